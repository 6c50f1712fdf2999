"""Rows whose output a grammar constrains: what they sample, when they wait, and that nobody else notices."""

import threading
import time
import weakref

import numpy as np
import pytest
import torch

from headrace.errors import ExecutionError
from headrace.messages.grammar import GrammarSpec, MaskWords
from headrace.messages.requests import LogprobSpec, PromptContent, SampleTask
from headrace.messages.step import NewSequence
from headrace.sampling import grammar_rows
from headrace.sampling.grammar_rows import TOO_SLOW
from headrace.sampling.params import ResolvedSamplingParams
from headrace.sampling.sampler import BAD_LOGITS, NOTHING_LEFT, Sampler

VOCAB = 200
EOS = 2
PROMPT = (5, 6, 7, 5)


class Countdown:
    """Allows the multiples of `factor`, and the end after `most` tokens. gate: masks wait for it. broken: the mask that fails."""

    def __init__(self, factor: int, most: int = 5, gate: threading.Event | None = None, broken: int = -1) -> None:
        self.factor, self.most, self.gate, self.broken = factor, most, gate, broken
        self.tokens: list[int] = []

    def start(self) -> "Countdown":
        return Countdown(self.factor, self.most, self.gate, self.broken)

    @property
    def is_complete(self) -> bool:
        return len(self.tokens) >= self.most

    def fill(self, words: MaskWords) -> None:
        if self.gate is not None:
            self.gate.wait()
        if len(self.tokens) == self.broken:
            raise ExecutionError("the grammar is broken")
        if not self.factor and not self.is_complete:
            raise ExecutionError("nothing follows")
        bits = np.zeros(len(words) * 32, np.uint8)
        if self.is_complete:
            bits[EOS] = 1
        else:
            bits[: VOCAB : self.factor] = 1
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> None:
        if token_id != EOS and (not self.factor or token_id % self.factor):
            raise ExecutionError(f"{token_id} is not allowed")
        self.tokens.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.tokens)
        del self.tokens[-num_tokens:]


def sequence(seq, grammar=None, *, outputs=(), logprobs=None, ends=(EOS,), **params) -> NewSequence:
    if grammar is not None:
        params["grammar"] = GrammarSpec("regex", "", "regex", params.pop("after_id", -1))
    sampling = ResolvedSamplingParams(**({"max_new_tokens": 50, "seed": 100 + seq, "temperature": 0.0} | params))
    return NewSequence(
        seq=seq,
        rid=f"r{seq}",
        token_ids=np.array([*PROMPT, *outputs], dtype=np.int32),
        num_prompt_tokens=len(PROMPT),
        prefix_slots=np.empty(0, dtype=np.int32),
        task=SampleTask(sampling, logprobs=logprobs),
        end_token_ids=ends,
        content=PromptContent(np.array(PROMPT, np.int32).tobytes()),
        grammar=grammar,
    )


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Masks that come are waited for, however busy the machine is."""
    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 60.0)


@pytest.fixture
def hurried(monkeypatch, patient):
    """Masks that do not come are not waited for."""
    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 0.002)


@pytest.fixture
def make():
    made = []

    def sampler(*news: NewSequence) -> Sampler:
        made.append(Sampler(VOCAB, 16, "cpu", {}))
        for new in news:
            made[-1].add(new.seq, new)
        return made[-1]

    yield sampler
    for sampler in made:
        sampler.grammars.close()


def step(sampler: Sampler, logits: torch.Tensor, num_outputs=0, seqs=None):
    seqs = list(range(len(logits))) if seqs is None else seqs
    counts = [num_outputs] * len(seqs) if isinstance(num_outputs, int) else num_outputs
    positions = [len(PROMPT) + count for count in counts]
    sampler.grammars.begin(seqs, positions)
    return sampler.sample(logits, seqs, positions, counts, [f"r{seq}" for seq in seqs])


def table(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32) * 3)


KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "typical_p": 0.3},
    {"repetition_penalty": 1.3, "temperature": 1.0},
    {"logit_bias": ((3, 4.0), (9, 6.0)), "bad_words": ((21,),), "temperature": 1.0},
    {"logprobs": LogprobSpec(0, 3)},
]


@pytest.mark.parametrize("options", KINDS)
def test_only_what_the_grammar_allows_is_sampled_and_that_is_as_if_the_rest_were_not_there(make, options):
    constrained = make(sequence(0, Countdown(3), **options))
    params = {name: value for name, value in options.items() if name != "logprobs"}
    reference = make(sequence(0, **params))
    for count in range(5):
        logits = table(1, seed=count)
        before = logits.clone()
        output = step(constrained, logits, count)
        assert torch.equal(logits, before)
        token_id = output.token_ids.item()
        assert token_id % 3 == 0
        allowed = torch.full_like(logits, -torch.inf)
        allowed[:, ::3] = logits[:, ::3]
        assert token_id == step(reference, allowed, count).token_ids.item()
    assert step(constrained, table(1), 5).token_ids.item() == EOS


def test_rows_without_a_grammar_do_not_notice_those_with_one(make):
    news = [sequence(seq, **options) for seq, options in enumerate(KINDS)]
    alone = make(*news)
    mixed = make(*news, *(sequence(len(KINDS) + i, Countdown(2 + i)) for i in range(3)))
    for count in range(4):
        logits = table(len(KINDS) + 3, seed=count)
        want = step(alone, logits[: len(KINDS)], count)
        got = step(mixed, logits, count)
        assert got.token_ids[: len(KINDS)].tolist() == want.token_ids.tolist()
        assert got.logprobs == want.logprobs
        assert [token_id % (2 + i) for i, token_id in enumerate(got.token_ids[len(KINDS) :].tolist())] == [0, 0, 0]


def test_logprobs_are_of_the_models_own_logits(make):
    logits = table(1)
    top = logits.argmax().item()
    output = step(make(sequence(0, Countdown(199), logprobs=LogprobSpec(0, 1))), logits)
    [token_id] = output.token_ids.tolist()
    block = output.logprobs[0]
    want = logits.log_softmax(dim=1)[0]
    assert np.frombuffer(block.values, np.float32)[0] == pytest.approx(want[token_id].item(), abs=1e-5)
    assert top in np.frombuffer(block.top_ids, np.int32)


def test_a_mask_that_is_late_holds_up_only_its_row_which_is_sampled_when_it_is_there(make, hurried):
    gate = threading.Event()
    sampler = make(sequence(0), sequence(1, Countdown(3, gate=gate)), sequence(2, Countdown(2)))
    logits = table(3)
    late = step(sampler, logits)
    assert 1 in late.late
    assert late.errors == {}
    assert late.token_ids.tolist()[1] == -1
    assert late.token_ids.tolist()[0] == logits[0].argmax().item()
    # The next step was planned before: it has the row at the position after the one that was not sampled.
    ahead = step(sampler, table(2, seed=1), num_outputs=1, seqs=[0, 1])
    assert ahead.late == [1]
    gate.set()
    assert until_sampled(sampler, logits[1:2], 0, seq=1) == logits[1, ::3].argmax().item() * 3
    assert until_sampled(sampler, table(1, seed=2), 1, seq=1) % 3 == 0


def until_sampled(sampler: Sampler, logits: torch.Tensor, num_outputs: int, seq: int) -> int:
    """The token of a row that is planned until its mask is ready."""
    while (output := step(sampler, logits, num_outputs, [seq])).late:
        assert output.errors == {}
    return output.token_ids.item()


def test_a_mask_that_takes_too_long_ends_its_row(make, hurried, monkeypatch):
    gate = threading.Event()
    sampler = make(sequence(0), sequence(1, Countdown(3, gate=gate)))
    assert step(sampler, table(2)).late == [1]
    monkeypatch.setattr(grammar_rows, "LIMIT_S", 0.0)
    while not (output := step(sampler, table(2), num_outputs=[1, 0])).errors:
        assert output.late == [1]
    assert output.errors == {1: TOO_SLOW}
    assert output.token_ids.tolist()[0] >= 0
    gate.set()


def test_a_mask_that_waits_for_its_turn_is_not_too_slow(make, hurried, monkeypatch):
    gate = threading.Event()
    sampler = make(sequence(0), sequence(1, Countdown(3, gate=gate)))
    monkeypatch.setattr(grammar_rows, "LIMIT_S", 0.02)
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        output = step(sampler, table(2), num_outputs=[0, 0])
        assert (output.late, output.errors) == ([1], {})
    monkeypatch.setattr(grammar_rows, "WAIT_LIMIT_S", 0.05)
    assert step(sampler, table(2), num_outputs=[0, 0]).errors == {1: TOO_SLOW}
    gate.set()


def test_several_slow_masks_do_not_keep_a_quick_one_from_its_thread(make, hurried):
    gate = threading.Event()
    slow = [sequence(seq, Countdown(3, gate=gate)) for seq in range(2)]
    sampler = make(*slow, sequence(2, Countdown(5)), sequence(3))
    count = 0
    # The quick row is behind the slow ones.
    while (output := step(sampler, table(4, seed=count), num_outputs=[0, 0, 0, count])).token_ids[2] < 0:
        assert output.late == [0, 1, 2]
        count += 1
    assert output.late == [0, 1]
    assert output.token_ids[2].item() % 5 == 0
    gate.set()


def test_a_sequence_that_leaves_takes_its_grammar_with_it_though_its_mask_was_never_begun(make, hurried):
    gate, started = threading.Event(), []

    class Watched(Countdown):
        def start(self) -> Countdown:
            copy = Countdown(self.factor)
            started.append(weakref.ref(copy))
            return copy

    sampler = make(*(sequence(seq, Countdown(3, gate=gate)) for seq in range(3)), sequence(3, Watched(5)))
    # The first is in a thread, at least, and the last behind them.
    assert step(sampler, table(4)).late == [0, 1, 2, 3]
    assert started[0]() is not None
    sampler.grammars.discard(3)
    assert started[0]() is None
    gate.set()
    assert until_sampled(sampler, table(1), 0, seq=2) % 3 == 0


def test_an_error_of_a_grammar_ends_its_row_alone(make):
    sampler = make(sequence(0), sequence(1, Countdown(3, broken=1)), sequence(2, Countdown(0)))
    first = step(sampler, table(3))
    assert first.errors == {2: "nothing follows"}
    second = step(sampler, table(2), num_outputs=1)
    assert second.errors == {1: "the grammar is broken"}
    assert second.token_ids.tolist()[0] >= 0


def test_what_edits_and_grammar_leave_nothing_of_ends_its_row_alone(make):
    only = {"allowed_token_ids": (1, 7), "temperature": 1.0}
    sampler = make(sequence(0), sequence(1, Countdown(3), **only))
    assert step(sampler, table(2)).errors == {1: NOTHING_LEFT}


def test_bad_logits_end_a_constrained_row(make):
    logits = table(2)
    logits[1] = torch.nan
    assert step(make(sequence(0), sequence(1, Countdown(3))), logits).errors == {1: BAD_LOGITS}


def test_a_sequence_that_comes_back_goes_on_where_it_was(make):
    straight = make(sequence(0, Countdown(3, most=8), temperature=1.0))
    want = [step(straight, table(1, seed=i), i).token_ids.item() for i in range(9)]
    again = make(sequence(0, Countdown(3, most=8), temperature=1.0, outputs=want[:4]))
    assert [step(again, table(1, seed=i), i).token_ids.item() for i in range(4, 9)] == want[4:]
    # A step is run again.
    assert [step(straight, table(1, seed=i), i).token_ids.item() for i in range(2, 9)] == want[2:]


def test_outputs_that_a_grammar_does_not_allow_end_the_sequence_that_comes_back_with_them(make):
    sampler = make(sequence(0, Countdown(3), outputs=[3, 4]))
    assert step(sampler, table(1), 2).errors == {0: "4 is not allowed"}


def test_the_end_of_a_complete_output_wins_over_a_minimum(make):
    sampler = make(sequence(0, Countdown(3, most=2), min_new_tokens=10))
    assert [step(sampler, table(1, seed=i), i).token_ids.item() % 3 for i in range(2)] == [0, 0]
    assert step(sampler, table(1), 2).token_ids.item() == EOS


class MayEnd(Countdown):
    """Allows the end from the beginning, beside the multiples of its factor."""

    def start(self) -> "MayEnd":
        return MayEnd(self.factor, self.most)

    def fill(self, words: MaskWords) -> None:
        super().fill(words)
        words[0] |= 1 << EOS


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_new_tokens": 3}])
def test_an_output_that_may_end_does_not_before_it_has_to(make, options):
    logits = table(1)
    logits[0, EOS] = 50.0
    assert step(make(sequence(0, MayEnd(3))), logits).token_ids.item() == EOS
    sampler = make(sequence(0, MayEnd(3, most=3), **options))
    for count in range(3):
        assert step(sampler, logits, count).token_ids.item() % 3 == 0
    assert step(sampler, logits, 3).token_ids.item() == EOS


def test_a_grammar_begins_after_the_end_of_the_thoughts(make):
    end_of_thought = 7
    logits = [table(1, seed=i) for i in range(8)]
    for i, row in enumerate(logits):
        row[0, EOS] = 40.0  # an end that is not allowed before
        if i == 3:
            row[0, end_of_thought] = 50.0
    sampler = make(sequence(0, Countdown(3, most=2), after_id=end_of_thought))
    got = [step(sampler, row, i).token_ids.item() for i, row in enumerate(logits[:7])]
    free = [row[0].clone().index_fill_(0, torch.tensor(EOS), -torch.inf).argmax().item() for row in logits]
    assert got[:4] == [*free[:3], end_of_thought]
    assert [token_id % 3 for token_id in got[4:6]] == [0, 0]
    assert got[6] == EOS
    # A step is run again: within the output, and within the thoughts.
    assert [step(sampler, logits[i], i).token_ids.item() for i in range(5, 7)] == got[5:]
    assert [step(sampler, logits[i], i).token_ids.item() for i in range(1, 7)] == got[1:]
    again = make(sequence(0, Countdown(3, most=2), after_id=end_of_thought, outputs=got[:5]))
    assert [step(again, logits[i], i).token_ids.item() for i in range(5, 7)] == got[5:]


def test_a_row_is_taken_over_by_a_sequence_without_a_grammar(make):
    sampler = make(sequence(0, Countdown(3)))
    step(sampler, table(1))
    sampler.add(0, sequence(0))
    logits = table(1, seed=3)
    assert step(sampler, logits).token_ids.item() == logits.argmax().item()
