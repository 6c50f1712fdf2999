"""Steps on a GPU, queued without waiting for one another.

Owns the choice of how a step runs: as a captured graph (decode of few enough rows), eagerly (prefill and mixed steps), or in the
`ModelRunner`, which waits for every value (steps that need the host). Does not own the layers, the sampler or the graphs. Runs in the
scheduler's thread.

A step's tokens stay on the device, in the token buffer, from which the next step reads its input; that step may be queued before this one
has run. The host reads a copy of the tokens when it collects the step.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from headrace.attention.base import ReadTokens
from headrace.execution.device import Device, Download, upload_parts
from headrace.execution.forward_batch import ForwardBatch
from headrace.execution.graphs import GraphPool
from headrace.execution.model_runner import ModelRunner
from headrace.messages.step import Int32Array, ModelWorkerBatch, StepResult, one_id_a_row
from headrace.sampling.sampler import BAD_LOGITS


class Pending(Protocol):
    """A queued step."""

    def result(self) -> StepResult:
        """Wait for the result. To be called once, in the order of the launches."""


@dataclass(frozen=True, slots=True)
class _Done:
    step: StepResult

    def result(self) -> StepResult:
        return self.step


@dataclass(slots=True)
class _Busy:
    """until: when the step that was collected last had finished."""

    until: float = 0.0


@dataclass(frozen=True, slots=True)
class _Queued:
    """rows: those that sample, in the order of the ids. begin: when it was queued; it runs when the previous step is done."""

    step: int
    num_rows: int
    rows: Int32Array
    ids: Download
    begin: float
    busy: _Busy

    def result(self) -> StepResult:
        token_ids = np.full(self.num_rows, -1, np.int32)
        ids = self.ids.wait()
        token_ids[self.rows] = ids
        errors = dict.fromkeys(self.rows[ids < 0].tolist(), BAD_LOGITS)
        begin, self.busy.until = max(self.begin, self.busy.until), time.perf_counter()
        return StepResult(self.step, *one_id_a_row(token_ids.tolist()), errors, forward_s=self.busy.until - begin)


class DeviceRunner:
    """A `ModelRunner` on a device, and its graphs. graphs: None = every step runs eagerly."""

    def __init__(self, runner: ModelRunner, device: Device, graphs: GraphPool | None) -> None:
        self.runner = runner
        self.graphs = graphs
        self._device = device
        self._busy = _Busy()

    @torch.inference_mode()
    def launch(self, plan: ModelWorkerBatch) -> Pending:
        """Queue a step. Raises errors of the host."""
        begin = time.perf_counter()
        runner = self.runner
        runner.add(plan)
        if runner.needs_host(plan):
            return _Done(runner.compute(plan))
        runner.loras.step.rows = None
        rows = np.flatnonzero(plan.num_logits).astype(np.int32)
        graphs = self.graphs
        num_rows = len(plan.seqs)
        if graphs is not None and plan.num_tokens == num_rows == len(rows) and graphs.size_for(num_rows) is not None:
            ids = self._replay(plan, graphs)
        else:
            ids = self._eager(plan, rows)
        return _Queued(plan.step, num_rows, rows, self._device.download(ids), begin, self._busy)

    def _replay(self, plan: ModelWorkerBatch, graphs: GraphPool) -> torch.Tensor:
        """int64[num_rows], the sampled ids."""
        step = graphs.replay(plan.seqs, plan.starts, plan.out_slots)
        sampler = self.runner.sampler
        if sampler.all_greedy(plan.seqs):
            return step.greedy.clone()
        ids = sampler.pick(step.logits, plan.seqs, plan.starts + 1)
        self.runner.table.tokens.index_put_((step.seqs, step.positions + 1), ids.clamp(min=0))
        return ids

    def _eager(self, plan: ModelWorkerBatch, rows: Int32Array) -> torch.Tensor:
        """int64[len(rows)], the ids of the rows that sample."""
        runner = self.runner
        batch = ForwardBatch.from_plan(plan, runner.table)
        if not len(rows):
            nothing = torch.empty(0, dtype=torch.int64, device=batch.token_ids.device)
            runner.hidden_states(batch, ReadTokens(nothing, [0] * (len(plan.seqs) + 1)))
            # Wait anyway, or the scheduler would plan all chunks of a long prompt ahead.
            return nothing
        ends = np.cumsum(plan.counts, dtype=np.int64)[rows]
        seqs, positions = plan.seqs[rows], (plan.starts + plan.counts)[rows]
        last, at_rows, at_positions = upload_parts(
            self._device, [ends - 1, seqs.astype(np.int64), positions.astype(np.int64)]
        )
        reads = None
        if len(rows) < plan.num_tokens:
            reads = ReadTokens(last, [0, *np.cumsum(plan.num_logits).tolist()])
        hidden = runner.hidden_states(batch, reads)
        ids = runner.sampler.pick(runner.model.logits(hidden), seqs, positions)
        runner.table.tokens.index_put_((at_rows, at_positions), ids.clamp(min=0))
        return ids
