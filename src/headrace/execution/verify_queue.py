"""Steps that verify drafts, on a device: their layers are the replay of a captured graph (`graphs`), and nothing waits where the device can choose.

Owns the choice of the steps that a graph can run, and how their drafts are verified. What a sequence with penalties, logit edits, logprobs or a
grammar samples depends on its ids before, or the host is to be told of each: a step with such a row waits, and is sampled position by position
(`verify`) from the logits that the graph gives. In other steps the ids are chosen and compared with the drafts on the device. Runs in the thread that
runs the steps.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from headrace.execution.device import Device, Download
from headrace.execution.forward_batch import cumulative, token_places
from headrace.execution.graphs import GraphPool, VerifiedStep, num_right
from headrace.execution.model_runner import ModelRunner
from headrace.execution.queued_step import Busy
from headrace.messages.step import ModelWorkerBatch, StepResult, ragged
from headrace.sampling.sampler import BAD_LOGITS


@dataclass(frozen=True, slots=True)
class QueuedVerification:
    """A queued step that verifies drafts. chosen: int64[2, num_tokens], the ids after each token, -1 where the logits are bad, and how many of the
    drafts from there on were chosen. begin: when it was queued."""

    plan: ModelWorkerBatch
    begin: float
    busy: Busy
    chosen: Download

    def result(self) -> StepResult:
        """See `Pending`."""
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
        begin, self.busy.until = max(self.begin, self.busy.until), time.perf_counter()
        return StepResult(self.plan.step, *ragged(found), errors, forward_s=self.busy.until - begin)


class VerifyQueue:
    """graphs: with some that verify drafts. busy: of all steps of the device."""

    def __init__(self, runner: ModelRunner, device: Device, graphs: GraphPool, busy: Busy) -> None:
        self._runner = runner
        self._device = device
        self._graphs = graphs
        self._busy = busy

    def takes(self, plan: ModelWorkerBatch) -> bool:
        """Whether a graph can run this step: it has drafts, nothing else but known tokens of which each is the last, and is small enough."""
        if not np.array_equal(plan.counts, plan.num_logits) or not (plan.num_logits > 1).any():
            return False
        return self._graphs.verifying_size_for(plan.num_tokens) is not None and self._runner.needs_only_logits(plan)

    def needs_host(self, plan: ModelWorkerBatch) -> bool:
        """Whether a step that it takes has rows that the host samples."""
        return any(map(self._runner.sampler.depends_on_ids, plan.seqs.tolist()))

    def queue(self, plan: ModelWorkerBatch, begin: float) -> QueuedVerification:
        """Queue a step that does not need the host. Its new sequences have been added. begin: by `time.perf_counter`."""
        step = self._replay(plan)
        ids, right = step.greedy, step.num_right
        if not self._runner.sampler.all_greedy(plan.seqs):
            ids, right = self._draw(plan, step)
        queued = QueuedVerification(plan, begin, self._busy, self._device.download(torch.stack((ids, right))))
        self._runner.after_sampling(plan)
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

    def _draw(self, plan: ModelWorkerBatch, step: VerifiedStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose an id after each token, as it would be chosen if all drafts were right: no id depends on those before. Write them to the token
        buffer. Returns them, and how many drafts from each token on were chosen."""
        seqs, positions = token_places(plan.seqs, plan.starts, plan.counts, cumulative(plan.counts))
        ids = self._runner.sampler.pick(step.logits, seqs, positions + 1)
        self._runner.table.tokens.index_put_((step.seqs, step.positions + 1), ids.clamp(min=0))
        return ids, num_right(ids, step.drafts, step.num_after)
