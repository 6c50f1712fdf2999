"""Plans of decode steps over sequences whose context counts as cached.

The KV cache behind them holds zeros, which take as long to read as any other values.
"""

from collections.abc import Iterator

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
    """Decode steps of `batch` sequences whose first `context` tokens count as cached; row r owns the slots r * room onwards."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (batch, context + 1)).astype(np.int32)
    first = np.arange(batch, dtype=np.int32) * room
    new = tuple(
        sequence(r, tokens[r], (first[r] + np.arange(context, dtype=np.int32)).astype(np.int32), sampling)
        for r in range(batch)
    )
    seqs, ones = np.arange(batch, dtype=np.int32), np.ones(batch, np.int32)
    for step in range(room - context - 1):
        starts = np.full(batch, context + step, np.int32)
        yield ModelWorkerBatch(step, new if step == 0 else (), seqs, starts, ones, ones, first + starts)


def sequence(
    seq: int, tokens: Int32Array, cached: Int32Array, sampling: ResolvedSamplingParams = GREEDY
) -> NewSequence:
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
