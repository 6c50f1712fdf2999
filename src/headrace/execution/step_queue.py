"""Queues the layers of a step on a device, and the writing of its tokens, without waiting: on the device of a whole model, and of each rank.

Owns the tensors of such a step. Does not choose how it runs, nor which ids it gives (`pick`): a follower gets them from the leader's device.
Runs in the thread that runs the steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.attention.base import ReadTokens
from headrace.execution.device import Device, upload_parts
from headrace.execution.forward_batch import ForwardBatch
from headrace.execution.graphs import GraphPool
from headrace.execution.model_runner import ModelRunner
from headrace.messages.ranks import QueuedKind
from headrace.messages.step import Int32Array, ModelWorkerBatch

Pick = Callable[[torch.Tensor, Int32Array, Int32Array, Sequence[int]], torch.Tensor]
"""(logits, seqs, positions, constrained) -> ids: see `Sampler.pick`. A follower's logits are its part."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """ids: int64[R] of the rows that sample, on the device; those of constrained rows mean nothing. logits: float32[R, V], until the next step."""

    ids: torch.Tensor
    logits: torch.Tensor


class StepQueue:
    """graphs: None = every step runs eagerly. pick: chooses the ids of a step whose graph does not."""

    def __init__(self, runner: ModelRunner, device: Device, graphs: GraphPool | None, pick: Pick) -> None:
        self._runner = runner
        self._device = device
        self._graphs = graphs
        self._pick = pick

    def run(self, plan: ModelWorkerBatch, kind: QueuedKind, constrained: Sequence[int] = ()) -> Sampled:
        """Queue a step whose new sequences have been added. constrained: of the rows that sample, those that are sampled later."""
        self._runner.loras.step.rows = None
        if kind == "eager":
            return self._eager(plan, constrained)
        assert self._graphs is not None, kind
        return self._replay(plan, self._graphs, kind == "greedy graph", constrained)

    def _replay(
        self, plan: ModelWorkerBatch, graphs: GraphPool, is_greedy: bool, constrained: Sequence[int]
    ) -> Sampled:
        """A decode step. is_greedy: the graph's own choice of ids is used, and lies in the token buffer."""
        step = graphs.replay(plan.seqs, plan.starts, plan.out_slots)
        if is_greedy:
            return Sampled(step.greedy.clone(), step.logits)
        ids = self._pick(step.logits, plan.seqs, plan.starts + 1, constrained)
        self._runner.table.tokens.index_put_((step.seqs, step.positions + 1), ids.clamp(min=0))
        return Sampled(ids, step.logits)

    def _eager(self, plan: ModelWorkerBatch, constrained: Sequence[int]) -> Sampled:
        """Any step."""
        runner = self._runner
        rows = np.flatnonzero(plan.num_logits)
        batch = ForwardBatch.from_plan(plan, runner.table)
        if not len(rows):
            nothing = torch.empty(0, dtype=torch.int64, device=batch.token_ids.device)
            runner.hidden_states(batch, ReadTokens(nothing, [0] * (len(plan.seqs) + 1)))
            # The host waits for it anyway, or the scheduler would plan all chunks of a long prompt ahead.
            return Sampled(nothing, nothing)
        ends = np.cumsum(plan.counts, dtype=np.int64)[rows]
        seqs, positions = plan.seqs[rows], (plan.starts + plan.counts)[rows]
        last, at_rows, at_positions = upload_parts(
            self._device, [ends - 1, seqs.astype(np.int64), positions.astype(np.int64)]
        )
        reads = None
        if len(rows) < plan.num_tokens:
            reads = ReadTokens(last, [0, *np.cumsum(plan.num_logits).tolist()])
        logits = runner.model.logits(runner.hidden_states(batch, reads))
        ids = self._pick(logits, seqs, positions, constrained)
        runner.table.tokens.index_put_((at_rows, at_positions), ids.clamp(min=0))
        return Sampled(ids, logits)
