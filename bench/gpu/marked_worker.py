"""A worker whose steps are marked on the clock of the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.gpu.bench import Clock
from headrace.messages.step import ModelWorkerBatch, StepResult, Worker


@dataclass(frozen=True, slots=True)
class MarkedStep:
    """How large a step was, and its marks on the clock. num_cached: tokens before it, of all rows. num_pairs: of a query and a key that it sees."""

    num_rows: int
    num_tokens: int
    num_logits: int
    num_cached: int
    num_pairs: int
    begin: Any
    end: Any


class MarkedWorker:
    """A `Worker` that marks the beginning and the end of each step in the queue of the device."""

    def __init__(self, worker: Worker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock
        self.weights = worker.weights
        self.loras = worker.loras
        self.profiler = worker.profiler
        self.experts = worker.experts
        self.steps: list[MarkedStep] = []

    def submit(self, batch: ModelWorkerBatch) -> None:
        begin = self._clock.mark()
        self._worker.submit(batch)
        starts, counts = batch.starts.astype(np.int64), batch.counts.astype(np.int64)
        pairs = int((counts * starts + counts * (counts + 1) // 2).sum())
        num_logits, num_cached = int(batch.num_logits.sum()), int(starts.sum())
        self.steps.append(
            MarkedStep(len(batch.seqs), batch.num_tokens, num_logits, num_cached, pairs, begin, self._clock.mark())
        )

    def collect(self) -> StepResult:
        return self._worker.collect()

    def rest(self, left: tuple[int, ...]) -> None:
        self._worker.rest(left)

    def close(self) -> None:
        self._worker.close()
