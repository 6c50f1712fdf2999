"""Steps on a GPU, queued without waiting for one another.

Owns the choice of how a step runs: as a captured graph (decode of few enough rows), eagerly (prefill and mixed steps), or in the
`ModelRunner`, which waits for every value (steps that need the host). Does not own the layers, the sampler or the graphs. Runs in the
scheduler's thread.

A step's tokens stay on the device, in the token buffer, from which the next step reads its input; that step may be queued before this one
has run. The host reads a copy of the tokens when it collects the step. Rows that a grammar constrains are sampled later than the others
(`queued_step`), but before the next step is queued.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from headrace.attention.base import ReadTokens
from headrace.execution.device import Device, upload_parts
from headrace.execution.forward_batch import ForwardBatch
from headrace.execution.graphs import GraphPool
from headrace.execution.model_runner import ModelRunner
from headrace.execution.queued_step import Busy, ConstrainedStep, Done, Pending, QueuedStep, Unmasked
from headrace.messages.step import Int32Array, ModelWorkerBatch


@dataclass(frozen=True, slots=True)
class _Sampled:
    """ids: int64[R] of the rows that sample, on the device; those of constrained rows mean nothing. logits: float32[R, V], until the next step."""

    ids: torch.Tensor
    logits: torch.Tensor


class DeviceRunner:
    """A `ModelRunner` on a device, and its graphs. graphs: None = every step runs eagerly."""

    def __init__(self, runner: ModelRunner, device: Device, graphs: GraphPool | None) -> None:
        self.runner = runner
        self.graphs = graphs
        self._device = device
        self._busy = Busy()
        # The last step with constrained rows.
        self._constrained: ConstrainedStep | None = None

    @torch.inference_mode()
    def launch(self, plan: ModelWorkerBatch) -> Pending:
        """Queue a step, after what is still to be queued of the one before. Raises errors of the host."""
        begin = time.perf_counter()
        runner = self.runner
        if self._constrained is not None:
            self._constrained.sample()
        runner.add(plan)
        if runner.needs_host(plan):
            if self._constrained is not None:
                self._constrained.read()
            return Done(runner.compute(plan))
        runner.loras.step.rows = None
        rows = np.flatnonzero(plan.num_logits).astype(np.int32)
        constrained = runner.sampler.constrained_rows(plan.seqs[rows])
        graphs = self.graphs
        num_rows = len(plan.seqs)
        if graphs is not None and plan.num_tokens == num_rows == len(rows) and graphs.size_for(num_rows) is not None:
            sampled = self._replay(plan, graphs, constrained)
        else:
            sampled = self._eager(plan, rows, constrained)
        step = QueuedStep(plan.step, num_rows, rows, begin, self._busy)
        if not constrained:
            step.ids = self._device.download(sampled.ids)
            return step
        self._constrained = ConstrainedStep(
            step,
            Unmasked(plan.seqs[rows], (plan.starts + plan.counts)[rows], sampled.logits, sampled.ids),
            runner.sampler,
            runner.table,
            self._device,
            self._constrained,
        )
        return self._constrained

    def _replay(self, plan: ModelWorkerBatch, graphs: GraphPool, constrained: list[int]) -> _Sampled:
        """A decode step. constrained: rows that are sampled later."""
        step = graphs.replay(plan.seqs, plan.starts, plan.out_slots)
        sampler = self.runner.sampler
        if sampler.all_greedy(plan.seqs, constrained):
            return _Sampled(step.greedy.clone(), step.logits)
        ids = sampler.pick(step.logits, plan.seqs, plan.starts + 1, constrained)
        self.runner.table.tokens.index_put_((step.seqs, step.positions + 1), ids.clamp(min=0))
        return _Sampled(ids, step.logits)

    def _eager(self, plan: ModelWorkerBatch, rows: Int32Array, constrained: list[int]) -> _Sampled:
        """Any step. rows: those that sample. constrained: those of them that are sampled later."""
        runner = self.runner
        batch = ForwardBatch.from_plan(plan, runner.table)
        if not len(rows):
            nothing = torch.empty(0, dtype=torch.int64, device=batch.token_ids.device)
            runner.hidden_states(batch, ReadTokens(nothing, [0] * (len(plan.seqs) + 1)))
            # Wait anyway, or the scheduler would plan all chunks of a long prompt ahead.
            return _Sampled(nothing, nothing)
        ends = np.cumsum(plan.counts, dtype=np.int64)[rows]
        seqs, positions = plan.seqs[rows], (plan.starts + plan.counts)[rows]
        last, at_rows, at_positions = upload_parts(
            self._device, [ends - 1, seqs.astype(np.int64), positions.astype(np.int64)]
        )
        reads = None
        if len(rows) < plan.num_tokens:
            reads = ReadTokens(last, [0, *np.cumsum(plan.num_logits).tolist()])
        hidden = runner.hidden_states(batch, reads)
        logits = runner.model.logits(hidden)
        ids = runner.sampler.pick(logits, seqs, positions, constrained)
        runner.table.tokens.index_put_((at_rows, at_positions), ids.clamp(min=0))
        return _Sampled(ids, logits)
