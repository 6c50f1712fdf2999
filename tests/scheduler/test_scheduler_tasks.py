"""A request's content and task go through the scheduler as they are."""

import numpy as np
import pytest
from fake_worker import Rig

from headrace.messages.outputs import DecodeOptions
from headrace.messages.requests import LogprobSpec, PoolTask, PromptContent, SampleTask, TokenizedGenerateReqInput
from headrace.messages.step import NewSequence
from headrace.sampling.params import ResolvedSamplingParams

PROMPT = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0]
CONTENT = PromptContent(np.array(PROMPT, np.int32).tobytes())


class TaskWithoutSampling:
    """A task that only computes its prompt, and has neither sampling parameters nor logprobs."""

    stream = False
    reads_all = False
    max_new_tokens = 0
    stream_interval = 0
    ignores_eos = True
    ends_with_turn = False
    is_plain = True
    prompt_logprob_start = 1 << 20
    stop_text = None
    grammar = None

    def end_token_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        return frozenset()

    def check(self, eos_token_ids: frozenset[int]) -> None: ...

    def with_prompt_logprobs_from(self, start: int) -> "TaskWithoutSampling":
        return self

    def decode_options(self, context_ids: bytes, output_ids: bytes, attempt: int) -> DecodeOptions:
        return DecodeOptions(context_ids=context_ids, output_ids=output_ids, attempt=attempt)


def entered(rig: Rig, *tasks: object) -> list[NewSequence]:
    """The sequences that requests of these tasks became, once all have ended."""
    seen: list[NewSequence] = []
    submit = rig.worker.submit

    def record(batch) -> None:
        seen.extend(batch.new)
        submit(batch)

    rig.worker.submit = record
    for number, task in enumerate(tasks):
        rig.inbox.send(TokenizedGenerateReqInput(str(number), CONTENT, task))
    rig.drain()
    return seen


def test_a_task_without_sampling_computes_its_prompt_and_ends():
    rig, task = Rig(chunk=4), TaskWithoutSampling()
    [new] = entered(rig, task)

    assert new.task is task
    [row] = rig.rows["0"]
    assert (row.finish.type, row.finish.length, row.ids) == ("length", 0, b"")
    assert row.options.context_ids == np.array(PROMPT[-8:], np.int32).tobytes()
    rig.check_idle()


@pytest.mark.parametrize("reads_all", [False, True])
def test_a_prompt_that_becomes_a_vector_has_one_output(reads_all):
    """It is computed in chunks; the prefix cache helps unless every hidden state is needed."""
    rig, task = Rig(chunk=4), PoolTask(reads_all=reads_all)
    content = PromptContent(np.array(PROMPT * 4, np.int32).tobytes())
    for rid in ("first", "second"):
        rig.inbox.send(TokenizedGenerateReqInput(rid, content, task))
        rig.drain()

    first, second = rig.rows["first"], rig.rows["second"]
    assert [len(rows) for rows in (first, second)] == [1, 1]
    assert (first[0].finish.type, first[0].ids, first[0].pooled) == ("length", b"", b"pooled first")
    assert second[0].pooled == b"pooled second"
    assert (second[0].stats.cached_tokens > 0) is not reads_all
    rig.check_idle()


def test_a_text_whose_tokens_see_each_other_is_never_cut():
    rig = Rig(chunk=12, step_tokens=12, whole_prompts=True)
    for number in range(5):
        content = PromptContent(np.array(PROMPT[: 5 + number], np.int32).tobytes())
        rig.inbox.send(TokenizedGenerateReqInput(str(number), content, PoolTask(reads_all=True)))
    counts: list[list[int]] = []
    submit = rig.worker.submit

    def record(batch) -> None:
        counts.append(batch.counts.tolist())
        submit(batch)

    rig.worker.submit = record
    rig.drain()
    assert counts == [[5, 6], [7], [8], [9]]
    rig.check_idle()


def test_the_worker_gets_the_task_of_the_request():
    params = ResolvedSamplingParams(max_new_tokens=4, seed=3, temperature=0.5, min_new_tokens=2)
    plain = SampleTask(params, stream=True, return_hidden_states=True, custom_logit_processor="p")
    told = SampleTask(params, logprobs=LogprobSpec(2, 3, (0,)))
    first, second = entered(Rig(), plain, told)

    assert first.content is CONTENT
    assert first.task is plain
    assert second.task == told


def test_a_sequence_that_enters_again_asks_only_for_prompt_logprobs_that_are_missing():
    rig = Rig(num_pages=40, chunk=4, step_tokens=8)
    rig.state.ratio.scale(0.01)
    params = ResolvedSamplingParams(max_new_tokens=30, seed=0, ignore_eos=True)
    news = entered(rig, *[SampleTask(params, logprobs=LogprobSpec(1))] * 3)

    starts = [new.task.logprobs.prompt_start for new in news]
    assert starts[:1] == [1]
    assert rig.state.counters.num_retracted > 0
    assert {start for start in starts if start > 1} == {len(PROMPT)}


def test_embeddings_share_no_kv_though_their_placeholders_are_equal():
    rig, task = Rig(), SampleTask(ResolvedSamplingParams(max_new_tokens=2, seed=0))
    for rid, embeds in (("text", b""), ("a", bytes(4 * len(PROMPT))), ("b", bytes(4 * len(PROMPT)))):
        rig.inbox.send(TokenizedGenerateReqInput(rid, PromptContent(CONTENT.token_ids, embeds), task))
        rig.drain()

    assert [rig.rows[rid][0].stats.cached_tokens for rid in ("text", "a", "b")] == [0, 0, 0]
    assert [rig.rows[rid][0].options.context_ids == b"" for rid in ("text", "a", "b")] == [False, True, True]
    rig.check_idle()
