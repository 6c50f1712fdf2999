"""Guesses by an EAGLE-3 head: `models/eagle3.py` says what it computes.

Owns the head's KV cache, of one layer, which has the slots of the target's. After a step the head follows: of each token that stays, it computes
the feature of the next, and the last one gives the first guess. The other guesses come when the next step begins, one pass each, and are computed
from the head's own features; their KV is overwritten when the target's are there.

    target     step n: a b c, samples d        | step n+1: d e' f', samples e f x
    head       after it: a b c (with b c d) -> e' | before: e' -> f' ... after: d e f (with e f x) -> ...

On a CPU; `DeviceEagleDrafter` does the same where steps are queued. Used by the thread that runs the steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.execution.draft_steps import DeviceDraftSteps, DraftRow, DraftSteps, Unread
from headrace.execution.forward_batch import cumulative, token_places
from headrace.messages.step import Int32Array, ModelWorkerBatch, NewSequence
from headrace.models.decoder import DecoderLM
from headrace.models.eagle3 import EagleHead
from headrace.speculative.base import NOTHING, Drafter, Guess


@dataclass(slots=True)
class _Row(DraftRow):
    """feature: [hidden_size] of the token before the next guess, as the head guesses it."""

    feature: torch.Tensor | None = None

    @property
    def known_feature(self) -> torch.Tensor:
        """The feature, of a row whose first guess is known."""
        assert self.feature is not None
        return self.feature


class EagleDrafter(Drafter):
    """target: keeps the streams that the head reads. most: tokens that are guessed at a time."""

    def __init__(self, head: EagleHead, target: DecoderLM, steps: DraftSteps, most: int) -> None:
        self._head = head
        self._target = target
        self._steps = steps
        self._most = most
        self._rows: dict[int, _Row] = {}

    def add(self, new: NewSequence) -> None:
        """See `Drafter.add`."""
        self._rows[new.seq] = _Row()

    def leave(self, seq: int) -> None:
        """See `Drafter.leave`."""
        self._rows.pop(seq, None)

    def extend(self, seq: int, ids: Sequence[int]) -> None:
        """See `Drafter.extend`."""
        self._rows[seq].learn(ids)

    def guess(self, seq: int) -> Guess:
        """See `Drafter.guess`: the first is known."""
        row = self._rows[seq]
        return Guess([*row.tokens, *[0] * (self._most - 1)], row.chance) if row.tokens else NOTHING

    def end(self, plan: ModelWorkerBatch, kept: Int32Array) -> None:
        """See `Drafter.end`."""
        rows = np.flatnonzero(kept)
        if not len(rows):
            return
        seqs, begins, counts = plan.seqs[rows], plan.starts[rows], kept[rows]
        ends = begins + counts
        batch = self._steps.batch(plan, seqs, begins, ends)
        places = np.arange(counts.sum()) + np.repeat(cumulative(plan.counts)[rows] - cumulative(counts)[:-1], counts)
        index = torch.from_numpy(places)
        features = self._head.features([stream[index] for stream in self._target.tapped(plan.num_tokens)])
        next_ids = self._steps.next_ids(seqs, begins, ends)
        features = self._head.forward(features, next_ids, batch.rows.positions, self._steps.attention)
        sampled = [place for place, row in enumerate(rows.tolist()) if plan.num_logits[row]]
        for seq in seqs[sampled].tolist():
            self._rows[seq].tokens = []
        if sampled:
            last = torch.from_numpy(cumulative(counts)[1:][sampled] - 1).long()
            self._guess(features[last], seqs[sampled], ends[sampled] + 1)

    def begin(self, plan: ModelWorkerBatch) -> None:
        """See `Drafter.begin`."""
        promised = np.maximum(plan.num_logits - 1, 0)
        if promised.max(initial=0) < 2:
            return
        self._steps.enter_slots(plan)
        known = plan.starts + plan.counts - promised
        for number in range(1, int(promised.max())):
            wanted = np.flatnonzero(promised > number)
            seqs, ends = plan.seqs[wanted], known[wanted] + number - 1
            batch = self._steps.batch(plan, seqs, ends - 1, ends)
            features = torch.stack([self._rows[seq].known_feature for seq in seqs.tolist()])
            next_ids = self._steps.next_ids(seqs, ends - 1, ends)
            features = self._head.forward(features, next_ids, batch.rows.positions, self._steps.attention)
            self._guess(features, seqs, ends + 1)

    def _guess(self, features: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> None:
        """Guess the tokens at these positions, after the features of the tokens before."""
        ids = self._steps.guess(self._head.logits(features), seqs, positions)()
        for seq, feature, token_id in zip(seqs.tolist(), features, ids, strict=True):
            row = self._rows[seq]
            row.feature = feature
            row.tokens.append(token_id)


class DeviceEagleDrafter(Drafter):
    """The same on a device, where a step is queued before the one before it has run.

    The head follows a step as soon as its ids are queued: the streams of the step are still there (`DecoderLM.tapped`), and whatever overwrites them
    is queued later. Which drafts are right is not known by then, so the head computes what follows every token of the step, and the feature after
    each token that may be the last one to stay is kept. When the next step begins, the host knows which that was, and all its guesses are queued
    before it:

        device   step n: d e' f' -> e f x | head: d e' f' (with e f x) -> features after them | f -> y', y' -> z' | step n+1: x y' z' ...
        host     submit n                                                | collect n: x is new | submit n+1

    What the head has computed of a draft that was wrong is overwritten with the next step.

    target: keeps the streams that the head reads (`DecoderLM.keep_tapped`).
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
