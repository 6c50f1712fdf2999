"""Guesses by an EAGLE-3 head on a device, where a step is queued before the one before it has run; `eagle` does the same on a CPU.

The head follows a step as soon as its ids are queued: the streams of the step are still there (`DecoderLM.tapped`), and whatever overwrites them is
queued later. Which drafts are right is not known by then, so the head computes what follows every token of the step, and the feature after each
token that may be the last one to stay is kept. When the next step begins, the host knows which that was, and all its guesses are queued before it:

    device   step n: d e' f' -> e f x | head: d e' f' (with e f x) -> features after them | f -> y', y' -> z' | step n+1: x y' z' ...
    host     submit n                                                | collect n: x is new | submit n+1

What the head has computed of a draft that was wrong is overwritten with the next step. Runs in the thread that runs the steps.
"""

from collections.abc import Sequence

import numpy as np
import torch

from headrace.execution.draft_steps import DeviceDraftSteps, DraftRow, Unread
from headrace.execution.forward_batch import cumulative, token_places
from headrace.messages.step import Int32Array, ModelWorkerBatch, NewSequence
from headrace.models.decoder import DecoderLM
from headrace.models.eagle3 import EagleHead
from headrace.speculative.base import Drafter, Guess


class DeviceEagleDrafter(Drafter):
    """target: keeps the streams that the head reads (`DecoderLM.keep_tapped`).

    features: [max_seqs, 1 + most, hidden_size], of each sequence the last ones of a step; that after position p is number p % (1 + most).
    """

    def __init__(self, head: EagleHead, target: DecoderLM, steps: DeviceDraftSteps, features: torch.Tensor) -> None:
        self._head = head
        self._target = target
        self._steps = steps
        self._features = features
        self._rows: dict[int, DraftRow] = {}
        self._unread = Unread()

    def add(self, new: NewSequence) -> None:
        """See `Drafter.add`."""
        self._rows[new.seq] = DraftRow()

    def leave(self, seq: int) -> None:
        """See `Drafter.leave`."""
        self._rows.pop(seq, None)

    def extend(self, seq: int, ids: Sequence[int]) -> None:
        """See `Drafter.extend`."""
        self._unread.read()
        self._rows[seq].learn(ids)

    def guess(self, seq: int) -> Guess:
        """See `Drafter.guess`: a promise."""
        return Guess([0] * (self._features.shape[1] - 1), self._rows[seq].chance)

    def follow(self, plan: ModelWorkerBatch) -> None:
        """See `Drafter.follow`."""
        ends = plan.starts + plan.counts
        features = self._head.features(self._target.tapped(plan.num_tokens))
        features = self._forward(plan, features, plan.seqs, plan.starts, ends)
        # A row that samples has a logit for each token that may be the last one to stay.
        num_read = plan.num_logits
        if not num_read.any():
            return
        reads = self._steps.reads(plan.counts, num_read)
        at = self._places(*token_places(plan.seqs, ends - num_read, num_read, cumulative(num_read)))
        self._features.index_put_(at, features if reads is None else features[reads.index])

    def begin(self, plan: ModelWorkerBatch) -> None:
        """See `Drafter.begin`."""
        self._unread.read()
        rows = [self._rows[seq] for seq in plan.seqs.tolist()]
        for row in rows:
            row.tokens = []
        promised = np.maximum(plan.num_logits - 1, 0)
        wanted = np.flatnonzero(promised)
        if not len(wanted):
            return
        self._steps.enter_slots(plan)
        known = plan.starts + plan.counts - promised
        features = self._features[self._places(plan.seqs[wanted], known[wanted] - 2)]
        for number in range(int(promised.max())):
            if number:
                still = np.flatnonzero(promised[wanted] > number).astype(np.int32)
                if len(still) < len(wanted):
                    [index] = self._steps.uploaded(still)
                    wanted, features = wanted[still], features[index]
                ends = known[wanted] + number - 1
                features = self._forward(plan, features, plan.seqs[wanted], ends - 1, ends)
            guessed = self._steps.guess(self._head.logits(features), plan.seqs[wanted], known[wanted] + number)
            self._unread.add([rows[row] for row in wanted], guessed)

    def _forward(
        self, plan: ModelWorkerBatch, features: torch.Tensor, seqs: Int32Array, begins: Int32Array, ends: Int32Array
    ) -> torch.Tensor:
        """features: at positions begins[i] .. ends[i] - 1 of sequence seqs[i]. Returns those one position further, as the head guesses them."""
        batch = self._steps.batch(plan, seqs, begins, ends)
        next_ids = self._steps.next_ids(seqs, begins, ends)
        return self._head.forward(features, next_ids, batch.rows.positions, self._steps.attention)

    def _places(self, seqs: Int32Array, positions: Int32Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the features after these positions are kept."""
        at_seqs, numbers = self._steps.uploaded(seqs, positions % self._features.shape[1])
        return at_seqs, numbers
