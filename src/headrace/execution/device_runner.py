"""Steps on a GPU, queued without waiting for one another.

Owns the choice of how a step runs: as a captured graph (decode of few enough rows, also with drafts: `VerifyQueue`), eagerly (prefill and mixed
steps), or in the `ModelRunner`, which waits for every value (other steps that need the host). Does not own the layers, the sampler or the graphs.
Runs in the scheduler's thread.

A step's tokens stay on the device, in the token buffer, from which the next step reads its input; that step may be queued before this one
has run. The host reads a copy of the tokens when it collects the step. Rows that a grammar constrains are sampled later than the others
(`queued_step`), but before the next step is queued. Where several ranks run the model, this one leads: it tells the others of each step before
it queues it (`ranks`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.execution.device import Device, Download
from headrace.execution.forward_batch import cumulative, token_places
from headrace.execution.graphs import GraphPool, VerifiedStep, num_right
from headrace.execution.model_runner import ModelRunner
from headrace.execution.profiler import StepClock
from headrace.execution.queued_step import (
    ConstrainedStep,
    Done,
    Followers,
    GuessingStep,
    QueuedStep,
    StepQueue,
    Unmasked,
)
from headrace.execution.worker import Pending
from headrace.messages.ranks import QueuedKind
from headrace.messages.step import Int32Array, ModelWorkerBatch, StepResult, ragged
from headrace.sampling.sampler import BAD_LOGITS


@dataclass(frozen=True, slots=True)
class QueuedVerification:
    """A queued step that verifies drafts. chosen: int64[2, num_tokens], the ids after each token, -1 where the logits are bad, and how many of the
    drafts from there on were chosen. begin: when it was queued."""

    plan: ModelWorkerBatch
    begin: float
    clock: StepClock
    chosen: Download

    def result(self) -> StepResult:
        ids, right = self.chosen.wait()
        firsts = cumulative(self.plan.counts)[:-1]
        found = [ids[first : first + count + 1].tolist() for first, count in zip(firsts, right[firsts], strict=True)]
        errors: dict[int, str] = {}
        for row, ids_of_row in enumerate(found):
            if ids_of_row[-1] < 0:
                ids_of_row.pop()
                # After ids that count, the next step comes to this position again, and to the error.
                if not ids_of_row:
                    errors[row] = BAD_LOGITS
        return StepResult(self.plan.step, *ragged(found), errors, forward_s=self.clock.took(self.begin))


class VerifyQueue:
    """Steps that verify drafts: their layers are the replay of a captured graph, and nothing waits where the device can choose.

    What a sequence with penalties, logit edits, logprobs or a grammar samples depends on its ids before, or the host is to be told of each: a step
    with such a row waits, and is sampled position by position (`verify`) from the logits that the graph gives. In other steps the ids are chosen and
    compared with the drafts on the device. graphs: with some that verify drafts. clock: of all steps of the device.
    """

    def __init__(self, runner: ModelRunner, device: Device, graphs: GraphPool, clock: StepClock) -> None:
        self._runner = runner
        self._device = device
        self._graphs = graphs
        self._clock = clock

    def takes(self, plan: ModelWorkerBatch) -> bool:
        """Whether a graph can run this step: it has drafts, nothing else but known tokens of which each is the last, and is small enough."""
        if not np.array_equal(plan.counts, plan.num_logits) or not (plan.num_logits > 1).any():
            return False
        fits = self._graphs.size_for(plan.num_tokens, verifies=True) is not None
        return fits and self._runner.needs_only_logits(plan)

    def queue(self, plan: ModelWorkerBatch, begin: float) -> QueuedVerification:
        """Queue a step that does not need the host. Its new sequences have been added. begin: by `time.perf_counter`."""
        step, runner = self._replay(plan), self._runner
        ids, right = step.greedy, step.num_right
        if not runner.sampler.all_greedy(plan.seqs):
            # As each would be chosen if all drafts were right: no id depends on those before.
            seqs, positions = token_places(plan.seqs, plan.starts, plan.counts, cumulative(plan.counts))
            ids = runner.sampler.pick(step.logits, seqs, positions + 1)
            runner.table.tokens.index_put_((step.seqs, step.positions + 1), ids.clamp(min=0))
            right = num_right(ids, step.drafts, step.num_after)
        queued = QueuedVerification(plan, begin, self._clock, self._device.download(torch.stack((ids, right))))
        runner.after_sampling(plan)
        return queued

    def compute(self, plan: ModelWorkerBatch, begin: float) -> StepResult:
        """Run a step that needs the host, and wait for it. The grammars know all tokens before it."""
        self._runner.begin_masks(plan)
        step = self._replay(plan)
        drafts = self._device.download(step.drafts.clone()).wait()
        return self._runner.verify(plan, step.logits, drafts.tolist(), begin)

    def _replay(self, plan: ModelWorkerBatch) -> VerifiedStep:
        runner = self._runner
        runner.loras.step.rows = None
        if runner.drafts is not None:
            runner.drafts.begin(plan)
        return self._graphs.verify(plan.seqs, plan.starts, plan.counts, plan.out_slots)


class DeviceRunner:
    """A `ModelRunner` on a device, and its graphs. graphs: None = every step runs eagerly. followers: the other ranks,
    None = it is alone."""

    def __init__(
        self, runner: ModelRunner, device: Device, graphs: GraphPool | None, followers: Followers | None = None
    ) -> None:
        self.runner = runner
        self.idle = runner.idle
        self.graphs = graphs
        self._device = device
        self._followers = followers or Followers(runner)
        self.adapters = self._followers.adapters
        self._steps = StepQueue(runner, device, graphs, self._pick)
        self._clock = StepClock()
        self._verify = None
        if graphs is not None and graphs.verifying_sizes:
            self._verify = VerifyQueue(runner, device, graphs, self._clock)
        self._graphs_are_stale = False
        self._last = -1  # number of the step that was queued last
        # The last step with constrained rows.
        self._constrained: ConstrainedStep | None = None

    def capture(self) -> None:
        """Capture the graphs, with all ranks."""
        with self._followers.turn():
            self._capture()

    def capture_later(self) -> None:
        """The weights have moved: capture the graphs with the next step, when the other ranks have the new weights, too."""
        self._graphs_are_stale = True

    @torch.inference_mode()
    def launch(self, plan: ModelWorkerBatch) -> Pending:
        """Queue a step, after what is still to be queued of the one before. Raises errors of the host."""
        begin = time.perf_counter()
        self._last = plan.step
        with self._followers.turn():
            step = self._launch(plan, begin)
        if self.runner.drafts is None or isinstance(step, Done):
            return step
        return GuessingStep(step, plan, self.runner, lambda: self._last == plan.step)

    def _launch(self, plan: ModelWorkerBatch, begin: float) -> Pending:
        runner = self.runner
        if self._constrained is not None:
            self._constrained.sample()
        if self._graphs_are_stale:
            self._capture()
        self._followers.add(plan)
        if runner.needs_host(plan):
            return self._launch_waiting(plan, begin)
        rows = np.flatnonzero(plan.num_logits).astype(np.int32)
        constrained = runner.sampler.grammars.rows_of(plan.seqs[rows])
        kind = self._kind(plan, rows, constrained)
        self._followers.begin(plan, kind)
        if runner.drafts is not None:
            runner.drafts.begin(plan)
        sampled = self._steps.run(plan, kind, constrained)
        step = QueuedStep(plan.step, len(plan.seqs), rows, begin, self._clock)
        if not constrained:
            step.ids = self._device.download(sampled.ids)
            runner.after_sampling(plan)
            return step
        self._constrained = ConstrainedStep(
            step,
            Unmasked(
                plan.seqs[rows],
                (plan.starts + plan.counts)[rows],
                sampled.logits,
                sampled.ids,
                lambda: runner.after_sampling(plan),
            ),
            runner.sampler,
            runner.table,
            self._device,
            self._constrained,
            self._followers,
        )
        return self._constrained

    def _launch_waiting(self, plan: ModelWorkerBatch, begin: float) -> Pending:
        """A step that waits for the device, unless it only verifies drafts that the device can verify."""
        verify = self._verify if self._verify is not None and self._verify.takes(plan) else None
        if verify is not None and not any(map(self.runner.sampler.depends_on_ids, plan.seqs.tolist())):
            return verify.queue(plan, begin)
        if self._constrained is not None:
            self._constrained.read()
        if verify is not None:
            return Done(verify.compute(plan, begin))
        self._followers.begin(plan, "whole")
        return Done(self.runner.compute(plan))

    def _capture(self) -> None:
        self._graphs_are_stale = False
        if self.graphs is not None:
            self._followers.capture()
            self.graphs.capture()

    def _kind(self, plan: ModelWorkerBatch, rows: Int32Array, constrained: Sequence[int]) -> QueuedKind:
        """rows: those that sample. constrained: those of them that are sampled later."""
        num_rows = len(plan.seqs)
        if (
            self.graphs is None
            or not plan.num_tokens == num_rows == len(rows)
            or self.graphs.size_for(num_rows) is None
        ):
            return "eager"
        return "greedy graph" if self.runner.sampler.all_greedy(plan.seqs, constrained) else "graph"

    def _pick(
        self, logits: torch.Tensor, seqs: Int32Array, positions: Int32Array, constrained: Sequence[int]
    ) -> torch.Tensor:
        ids = self.runner.sampler.pick(logits, seqs, positions, constrained)
        self._followers.share(ids)
        return ids
