"""Plans of steps: row r owns the slots r * room onwards. Of prompts, and of decode steps over sequences whose context counts as cached.

The KV cache behind them holds zeros, which take as long to read as any other values.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import Int32Array, ModelWorkerBatch, NewSequence, StepResult
from headrace.sampling.params import ResolvedSamplingParams

GREEDY = ResolvedSamplingParams(max_new_tokens=1 << 20, seed=0, temperature=0.0, ignore_eos=True)
DRAWN = ResolvedSamplingParams(max_new_tokens=1 << 20, seed=5, temperature=0.8, top_k=40, top_p=0.9, ignore_eos=True)
PENALISED = ResolvedSamplingParams(
    max_new_tokens=1 << 20, seed=0, temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.2, ignore_eos=True
)


def decode_plans(
    batch: int, context: int, vocab_size: int, room: int, sampling: ResolvedSamplingParams = GREEDY
) -> Iterator[ModelWorkerBatch]:
    """Decode steps of `batch` sequences whose first `context` tokens count as cached."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (batch, context + 1)).astype(np.int32)
    new = tuple(
        _sequence(row, tokens[row], np.arange(row * room, row * room + context, dtype=np.int32), sampling)
        for row in range(batch)
    )
    for step in range(room - context - 1):
        yield decode_plan(step, np.full(batch, context + step, np.int32), room, new if step == 0 else ())


def decode_plan(step: int, starts: Int32Array, room: int, new: tuple[NewSequence, ...] = ()) -> ModelWorkerBatch:
    """One token of each row."""
    seqs, ones = np.arange(len(starts), dtype=np.int32), np.ones(len(starts), np.int32)
    return ModelWorkerBatch(step, new, seqs, starts, ones, ones, seqs * room + starts)


def prompt_plan(step: int, prompts: Sequence[Int32Array], room: int) -> ModelWorkerBatch:
    """All of some prompts."""
    nothing, seqs = np.empty(0, np.int32), np.arange(len(prompts), dtype=np.int32)
    new = tuple(_sequence(row, prompt, nothing, GREEDY) for row, prompt in enumerate(prompts))
    slots = [np.arange(row * room, row * room + len(prompt), dtype=np.int32) for row, prompt in enumerate(prompts)]
    counts = np.array([len(prompt) for prompt in prompts], np.int32)
    return ModelWorkerBatch(step, new, seqs, 0 * seqs, counts, np.ones_like(seqs), np.concatenate(slots))


def _sequence(seq: int, tokens: Int32Array, cached: Int32Array, sampling: ResolvedSamplingParams) -> NewSequence:
    return NewSequence(
        seq=seq,
        rid=str(seq),
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        prefix_slots=cached,
        task=SampleTask(sampling),
        end_token_ids=(),
        content=PromptContent(tokens.tobytes()),
    )


def check_result(result: StepResult) -> None:
    """No sequence of the step failed."""
    assert not result.errors, result.errors
