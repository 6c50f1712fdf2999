"""A few steps of made-up requests before the first real one: kernels are compiled and libraries set up when they first run.

Runs once, when a worker on a GPU has been built, in the thread that builds it. What the steps write to the KV pool belongs to no sequence.
"""

import time

import numpy as np

from headrace.log import get_logger
from headrace.messages.control import ReadyInfo
from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import ModelWorkerBatch, NewSequence, Worker
from headrace.sampling.params import ResolvedSamplingParams

_ROOM = 64
"""Tokens of a made-up sequence at most, and slots that it has."""

_KINDS = (
    ResolvedSamplingParams(max_new_tokens=_ROOM, seed=0, temperature=0.0, ignore_eos=True),
    ResolvedSamplingParams(max_new_tokens=_ROOM, seed=0, temperature=1.0, top_k=8, top_p=0.9, ignore_eos=True),
)

_STEPS = (((0, 5, True), (1, 20, False)), ((0, 1, True), (1, 17, True)), ((0, 1, True), (1, 1, True)), ((0, 1, True),))
"""Rows of each step: sequence, tokens, whether it samples. A prompt, another in two chunks beside decode, decode of two and of one."""


def warm_up(worker: Worker, info: ReadyInfo) -> None:
    """Prompts, chunks beside decode and decode, greedy and drawn. Nothing where two sequences of this length do not fit."""
    if min(info.max_total_tokens // 2, info.context_length) < _ROOM or info.max_running_requests < 2:
        return
    begin = time.perf_counter()
    computed = [0, 0]
    for number, rows in enumerate(_STEPS):
        seqs, counts, samples = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        starts = np.array([computed[seq] for seq in seqs], np.int32)
        slots = [seq * _ROOM + start + np.arange(count) for seq, start, count in zip(seqs, starts, counts, strict=True)]
        last = number == len(_STEPS) - 1
        worker.submit(
            ModelWorkerBatch(
                number,
                () if number else (_sequence(0, 5), _sequence(1, 37)),
                seqs,
                starts,
                counts,
                samples,
                np.concatenate(slots).astype(np.int32),
            )
        )
        worker.collect()
        for seq, count in zip(seqs, counts, strict=True):
            computed[seq] += int(count)
        if last:
            worker.idle((0, 1))
    get_logger(__name__).debug("warmed up in %.1f s", time.perf_counter() - begin)


def _sequence(seq: int, num_tokens: int) -> NewSequence:
    tokens = np.zeros(num_tokens, np.int32)
    return NewSequence(
        seq=seq,
        rid=f"warm-up-{seq}",
        token_ids=tokens,
        num_prompt_tokens=num_tokens,
        prefix_slots=np.empty(0, np.int32),
        task=SampleTask(_KINDS[seq]),
        end_token_ids=(),
        content=PromptContent(tokens.tobytes()),
    )
