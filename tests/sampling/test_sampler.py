"""The sampler: order of the edits, rows that fail alone, independence of the batch."""

import numpy as np
import pytest
import torch

from headrace.messages.requests import LogprobSpec, PromptContent, SampleTask
from headrace.messages.step import NewSequence
from headrace.sampling.params import ResolvedSamplingParams, ThinkingBudget
from headrace.sampling.sampler import BAD_LOGITS, NOTHING_LEFT, Sampler

VOCAB = 200
PROMPT = (5, 6, 7, 5)


def sequence(seq, *, outputs=(), ends=(2,), logprobs=None, processor="", input_embeds=b"", **params) -> NewSequence:
    sampling = ResolvedSamplingParams(**({"max_new_tokens": 50, "seed": 100 + seq, "temperature": 0.0} | params))
    return NewSequence(
        seq=seq,
        rid=f"r{seq}",
        token_ids=np.array([*PROMPT, *outputs], dtype=np.int32),
        num_prompt_tokens=len(PROMPT),
        prefix_slots=np.empty(0, dtype=np.int32),
        task=SampleTask(sampling, logprobs=logprobs, custom_logit_processor=processor),
        end_token_ids=ends,
        content=PromptContent(np.array(PROMPT, np.int32).tobytes(), input_embeds),
    )


def sampler(*news: NewSequence, **processors) -> Sampler:
    made = Sampler(VOCAB, 16, "cpu", processors)
    for new in news:
        made.add(new.seq, new)
    return made


def sample(made: Sampler, logits: torch.Tensor, seqs=(0,), num_outputs=0):
    outputs = [num_outputs] * len(seqs) if isinstance(num_outputs, int) else list(num_outputs)
    positions = [len(PROMPT) + n for n in outputs]
    return made.sample(logits, list(seqs), positions, outputs, [f"r{seq}" for seq in seqs])


def logits_of(values: dict[int, float] | None = None, rows: int = 1, rest: float = 0.0) -> torch.Tensor:
    logits = torch.full((rows, VOCAB), rest)
    for token_id, value in (values or {}).items():
        logits[:, token_id] = value
    return logits


def one(logits: torch.Tensor, num_outputs=0, **options) -> int:
    output = sample(sampler(sequence(0, **options)), logits, num_outputs=num_outputs)
    assert output.errors == {}
    return output.token_ids.item()


EVERY_KIND = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 100, "min_p": 0.01},
    {"temperature": 1.0, "typical_p": 0.5},
    {"temperature": 0.8, "typical_p": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    {"repetition_penalty": 1.3, "temperature": 1.0},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"logit_bias": ((3, 4.0), (9, -100.0)), "temperature": 1.0},
    {"allowed_token_ids": (1, 5, 9, 70), "temperature": 2.0},
    {"bad_words": ((7,), (1, 2)), "min_new_tokens": 2, "temperature": 1.2},
    {"thinking_budget": ThinkingBudget(num_tokens=2, end_id=8, is_open=True), "temperature": 1.0},
    {"logprobs": LogprobSpec(0, 3, (4,))},
    {"processor": "double", "temperature": 1.0},
]


def test_a_request_gives_the_same_tokens_alone_and_in_any_batch():
    table = torch.from_numpy(
        np.random.default_rng(0).standard_normal((6, len(EVERY_KIND), VOCAB)).astype(np.float32) * 2
    )
    news = [sequence(seq, **options) for seq, options in enumerate(EVERY_KIND)]
    seqs = range(len(news))

    def double(context, logits):
        return logits * 2

    together, backwards = sampler(*news, double=double), sampler(*news, double=double)
    alone = {seq: sampler(news[seq], double=double) for seq in seqs}
    for step, logits in enumerate(table):
        want = sample(together, logits, seqs, step)
        assert want.errors == {}
        order = list(reversed(seqs))
        other = sample(backwards, logits[order], order, step)
        for seq in seqs:
            single = sample(alone[seq], logits[seq : seq + 1].clone(), [seq], step)
            assert single.token_ids.item() == want.token_ids[seq].item() == other.token_ids[order.index(seq)].item()
            assert single.logprobs.get(0) == want.logprobs.get(seq) == other.logprobs.get(order.index(seq))


@pytest.mark.parametrize("options", EVERY_KIND[:-1], ids=str)
def test_a_retracted_sequence_goes_on_with_the_same_tokens(options):
    table = torch.from_numpy(np.random.default_rng(1).standard_normal((8, 1, VOCAB)).astype(np.float32) * 2)
    straight = sampler(sequence(0, **options))
    want = [sample(straight, logits, num_outputs=i).token_ids.item() for i, logits in enumerate(table)]
    again = sampler(sequence(0, outputs=want[:4], **options))
    got = [sample(again, table[i], num_outputs=i).token_ids.item() for i in range(4, 8)]
    assert got == want[4:]
    # A step that is run again forgets what it had sampled.
    assert [sample(straight, table[i], num_outputs=i).token_ids.item() for i in range(2, 8)] == want[2:]


def test_seeds_and_positions_give_different_draws():
    logits = torch.zeros(1, VOCAB)
    by_seed = {one(logits, temperature=1.0, seed=seed) for seed in range(50)}
    by_position = {one(logits, num_outputs=n, temperature=1.0) for n in range(50)}
    assert len(by_seed) > 30
    assert len(by_position) > 30


def test_the_logits_that_come_in_are_left_as_they_are():
    def spoil(context, logits):
        return logits.fill_(1.0)

    news = [sequence(seq, **options) for seq, options in enumerate(EVERY_KIND[:-1])] + [
        sequence(len(EVERY_KIND) - 1, processor="spoil")
    ]
    logits = torch.from_numpy(np.random.default_rng(2).standard_normal((len(news), VOCAB)).astype(np.float32))
    before = logits.clone()
    sample(sampler(*news, spoil=spoil), logits, range(len(news)))
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_id_of_equal_logits():
    assert one(logits_of({50: 3.0, 20: 3.0})) == 20


def test_a_row_with_nan_or_nothing_finite_ends_alone():
    news = [sequence(seq, **options) for seq, options in enumerate(EVERY_KIND)]
    logits = torch.from_numpy(np.random.default_rng(3).standard_normal((len(news), VOCAB)).astype(np.float32))

    def double(context, logits):
        return logits * 2

    want = sample(sampler(*news, double=double), logits, range(len(news)))
    for bad in range(len(news)):
        for poison in (torch.nan, -torch.inf):
            spoiled = logits.clone()
            spoiled[bad, 17 if poison != poison else slice(None)] = poison
            got = sample(sampler(*news, double=double), spoiled, range(len(news)))
            assert list(got.errors) == [bad]
            assert "NaN or no finite logits" in got.errors[bad]
            assert got.token_ids[bad].item() == -1
            others = [row for row in range(len(news)) if row != bad]
            assert got.token_ids[others].tolist() == want.token_ids[others].tolist()
            assert bad not in got.logprobs


def test_minus_infinity_in_a_row_is_fine():
    logits = logits_of({9: 1.0}, rest=-torch.inf)
    assert one(logits) == one(logits, temperature=1.0) == one(logits, temperature=1.0, top_p=0.5) == 9
    assert one(logits, temperature=1.0, top_k=5) == 9


def test_logit_bias_adds_and_sums_repeated_ids():
    assert one(logits_of({4: 1.0}), logit_bias=((8, 0.6), (8, 0.6))) == 8
    assert one(logits_of({4: 1.0}), logit_bias=((8, 0.6),)) == 4


def test_repetition_penalty_counts_the_prompt_and_shrinks_either_sign():
    assert one(logits_of({5: 1.0, 9: 0.9}), repetition_penalty=1.5) == 9
    assert one(logits_of({5: -1.0, 9: -1.2}, rest=-9.0), repetition_penalty=1.5) == 9
    assert one(logits_of({30: 1.0, 9: 0.9}), repetition_penalty=1.5) == 30
    assert one(logits_of({30: 1.0, 9: 0.9}), outputs=(30,), num_outputs=1, repetition_penalty=1.5) == 9


def test_repetition_penalty_ignores_the_placeholders_of_embeddings():
    assert one(logits_of({5: 1.0, 9: 0.9}), repetition_penalty=1.5, input_embeds=b"1234") == 5


def test_frequency_and_presence_count_outputs_only():
    logits = logits_of({5: 1.0, 9: 0.75})
    assert one(logits, frequency_penalty=2.0, presence_penalty=2.0) == 5
    assert one(logits, outputs=(5,), num_outputs=1, frequency_penalty=0.2) == 5
    assert one(logits, outputs=(5, 5), num_outputs=2, frequency_penalty=0.2) == 9
    assert one(logits, outputs=(5, 5), num_outputs=2, presence_penalty=0.2) == 5
    assert one(logits, outputs=(5, 5), num_outputs=2, presence_penalty=0.3) == 9


def test_sampled_tokens_are_counted():
    made = sampler(sequence(0, frequency_penalty=1.0))
    logits = logits_of({11: 3.0, 12: 2.5, 13: 2.1})
    assert [sample(made, logits, num_outputs=n).token_ids.item() for n in range(5)] == [11, 12, 13, 11, 12]


def test_bad_words_ban_the_last_token_of_a_matching_tail():
    logits = logits_of({31: 3.0, 8: 1.0})
    assert one(logits, bad_words=((31,),)) == 8
    assert one(logits, bad_words=((30, 31),)) == 31
    assert one(logits, outputs=(30,), num_outputs=1, bad_words=((30, 31),)) == 8
    assert one(logits, outputs=(30, 4), num_outputs=2, bad_words=((30, 31),)) == 31
    assert one(logits, bad_words=((5, 31),)) == 31  # 5 ends the prompt, which is not output


def test_only_allowed_ids_are_sampled():
    assert one(logits_of({31: 9.0, 8: 1.0, 3: 2.0}), allowed_token_ids=(8, 3)) == 3
    drawn = {one(logits_of({31: 9.0}), temperature=1.0, seed=seed, allowed_token_ids=(8, 3)) for seed in range(40)}
    assert drawn == {3, 8}


def test_end_and_stop_tokens_are_impossible_before_the_minimum():
    logits = logits_of({2: 9.0, 40: 8.0, 7: 1.0})
    for num_outputs, want in ((0, 7), (2, 7), (3, 2)):
        history = (1,) * num_outputs
        assert one(logits, num_outputs, outputs=history, min_new_tokens=3, stop_token_ids=(40,)) == want


def test_end_ids_outside_the_vocabulary_are_harmless():
    assert one(logits_of({2: 9.0, 7: 1.0}), min_new_tokens=1, ends=(2, VOCAB, 10**9, -1)) == 7


def test_masks_that_leave_nothing_end_the_row_alone():
    made = sampler(sequence(0), sequence(1, allowed_token_ids=(2,), min_new_tokens=1), sequence(2, bad_words=((9,),)))
    output = sample(made, logits_of({9: 2.0, 8: 1.0}, rows=3), (0, 1, 2))
    assert output.errors == {1: NOTHING_LEFT}
    assert output.token_ids.tolist() == [9, -1, 8]


def test_edits_that_overflow_end_the_row_alone():
    made = sampler(sequence(0, repetition_penalty=1e-44), sequence(1))
    output = sample(made, logits_of({5: 3.0}, rows=2), (0, 1))
    assert output.errors == {0: NOTHING_LEFT}
    assert output.token_ids.tolist() == [-1, 5]


def test_a_processor_runs_first_and_sees_the_tokens():
    seen = []

    def push(context, logits):
        seen.append((context.rid, context.prompt_ids.tolist(), context.output_ids.tolist()))
        logits[77] = 5.0
        return logits

    made = sampler(sequence(0, processor="push", logit_bias=((77, -1.0), (3, 4.5))), push=push)
    assert [sample(made, logits_of(), num_outputs=n).token_ids.item() for n in range(2)] == [3, 3]
    assert seen == [("r0", [*PROMPT], []), ("r0", [*PROMPT], [3])]


def test_a_processor_keeps_its_own_tensor():
    mine = torch.zeros(VOCAB)
    made = sampler(sequence(0, processor="fixed", logit_bias=((3, 4.5),)), fixed=lambda context, logits: mine)
    assert sample(made, logits_of()).token_ids.item() == 3
    assert mine.abs().sum() == 0


def raises(context, logits):
    raise RuntimeError("of the operator's code")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (raises, "the custom logit processor 'p' failed"),
        (lambda context, logits: logits[:-1], "returned torch.float32 [199]"),
        (lambda context, logits: logits.double(), "returned torch.float64"),
        (lambda context, logits: None, "did not return a tensor"),
        (lambda context, logits: logits * torch.nan, "returned NaN"),
        (lambda context, logits: logits - torch.inf, "no finite logits"),
    ],
)
def test_a_processor_that_fails_ends_its_row_alone(processor, message):
    made = sampler(sequence(0), sequence(1, processor="p"), sequence(2, temperature=1.0), p=processor)
    want = sample(sampler(sequence(0), sequence(2, temperature=1.0)), logits_of({9: 4.0}, rows=2), (0, 2))
    output = sample(made, logits_of({9: 4.0}, rows=3), (0, 1, 2))
    assert list(output.errors) == [1]
    assert message in output.errors[1]
    assert output.token_ids[[0, 2]].tolist() == want.token_ids.tolist()
    assert output.token_ids[1].item() == -1
    # A step that was already in flight finds the row as it was left: an error again, not a crash.
    later = sample(made, logits_of({9: 4.0}, rows=3), (0, 1, 2), 1)
    assert list(later.errors) == [1]


def test_an_unknown_processor_is_an_error_of_its_row():
    output = sample(sampler(sequence(0, processor="absent"), sequence(1)), logits_of({9: 4.0}, rows=2), (0, 1))
    assert list(output.errors) == [0]
    assert "absent" in output.errors[0]
    assert output.token_ids.tolist() == [-1, 9]


def test_logprobs_are_of_the_raw_logits():
    spec = LogprobSpec(0, 2, (4,))
    logits = logits_of({4: 2.0, 9: 3.0})
    made = sampler(
        sequence(0, logprobs=spec), sequence(1, logprobs=spec, logit_bias=((9, -50.0), (4, 50.0)), temperature=0.01)
    )
    output = sample(made, logits.repeat(2, 1), (0, 1))
    assert output.token_ids.tolist() == [9, 4]
    want = torch.log_softmax(logits[0].double(), dim=0)
    for row, token_id in ((0, 9), (1, 4)):
        block = output.logprobs[row]
        assert np.frombuffer(block.token_ids, "<i4").tolist() == [token_id]
        assert np.frombuffer(block.values, "<f4")[0] == pytest.approx(want[token_id].item(), abs=1e-6)
        assert np.frombuffer(block.top_ids, "<i4").tolist() == [9, 4]
        assert np.frombuffer(block.picked, "<f4")[0] == pytest.approx(want[4].item(), abs=1e-6)


def test_rows_that_did_not_ask_have_no_logprobs():
    made = sampler(sequence(0), sequence(1, logprobs=LogprobSpec(0)))
    assert list(sample(made, logits_of(rows=2), (0, 1)).logprobs) == [1]


def test_a_row_is_reused_by_a_new_sequence():
    made = sampler(sequence(0, bad_words=((9,),)))
    made.add(0, sequence(0))
    assert sample(made, logits_of({9: 4.0})).token_ids.item() == 9


def test_no_rows_give_no_tokens():
    assert sample(sampler(), logits_of(rows=0), ()).token_ids.tolist() == []


def test_the_message_of_a_broken_model_names_no_internals():
    output = sample(sampler(sequence(0)), torch.full((1, VOCAB), torch.nan))
    assert output.errors == {0: BAD_LOGITS}
