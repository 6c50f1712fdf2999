"""Guesses by a smaller model of the same vocabulary (Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023).

Owns that model's KV cache, which has the slots of the target's: what the scheduler decides about pages holds for both, and a cached prefix is
cached for both. The draft model follows the steps: when one begins, it computes those of its known tokens that it has not seen, and then, token by
token, what was promised:

    target     step n: a b c . . . . . . samples d   | step n+1: d e' f' g', samples e f x       | step n+2: x ...
    draft                                 (promised 3) a b c d -> e', e' -> f', f' -> g'            (promised 3) x -> ...
                                                                         ^ e' and f' were right: their KV stays

It draws with the random numbers of the target, at the same positions: where both models think alike, both draw the same token. Whatever it guesses,
no token changes. Used by the thread that runs the steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.execution.draft_steps import DraftRow, DraftSteps, Unread
from headrace.messages.step import Int32Array, ModelWorkerBatch, NewSequence
from headrace.models.spec import CausalLM
from headrace.speculative.base import Drafter, Guess


@dataclass(slots=True)
class _Row(DraftRow):
    """num_kv: tokens whose KV the draft model has. known: tokens that were known when the last step began."""

    num_kv: int = 0
    known: int = 0


class DraftModel(Drafter):
    """vocab_size: of the draft model; to it, tokens beyond are its last one. most: tokens that are guessed at a time."""

    def __init__(self, model: CausalLM, vocab_size: int, steps: DraftSteps, most: int) -> None:
        self._model = model
        self._last_id = vocab_size - 1
        self._steps = steps
        self._most = most
        self._rows: dict[int, _Row] = {}
        self._unread = Unread()

    def add(self, new: NewSequence) -> None:
        """See `Drafter.add`."""
        self._rows[new.seq] = _Row(num_kv=len(new.prefix_slots))

    def leave(self, seq: int) -> None:
        """See `Drafter.leave`."""
        self._rows.pop(seq, None)

    def extend(self, seq: int, ids: Sequence[int]) -> None:
        """See `Drafter.extend`."""
        self._unread.read()
        row = self._rows[seq]
        row.learn(ids)
        row.num_kv = min(row.num_kv, row.known + len(ids) - 1)

    def guess(self, seq: int) -> Guess:
        """See `Drafter.guess`: a promise."""
        return Guess([0] * self._most, self._rows[seq].chance)

    def begin(self, plan: ModelWorkerBatch) -> None:
        """See `Drafter.begin`."""
        self._unread.read()
        self._steps.enter_slots(plan)
        promised = np.maximum(plan.num_logits - 1, 0)
        known = plan.starts + plan.counts - promised
        rows = [self._rows[seq] for seq in plan.seqs.tolist()]
        begins = np.minimum(plan.starts, np.array([row.num_kv for row in rows], np.int32))
        for row, count in zip(rows, known.tolist(), strict=True):
            row.num_kv = row.known = count
            row.tokens = []
        for row, count in zip(rows, promised.tolist(), strict=True):
            row.num_kv += max(0, count - 1)
        wanted = np.flatnonzero(promised)
        hidden = self._forward(plan, plan.seqs, begins, known, np.minimum(promised, 1))
        for number in range(int(promised.max(initial=0))):
            if number:
                wanted = np.flatnonzero(promised > number)
                ends = known[wanted] + number
                hidden = self._forward(plan, plan.seqs[wanted], ends - 1, ends, np.ones_like(ends))
            guessed = self._steps.guess(self._model.logits(hidden), plan.seqs[wanted], known[wanted] + number)
            self._unread.add([rows[index] for index in wanted], guessed)

    def _forward(
        self,
        plan: ModelWorkerBatch,
        seqs: Int32Array,
        begins: Int32Array,
        ends: Int32Array,
        num_read: Int32Array,
    ) -> torch.Tensor:
        """Compute positions begins[i] .. ends[i] - 1 of sequence seqs[i]. Returns the hidden states after the last num_read[i] of them."""
        batch = self._steps.batch(plan, seqs, begins, ends)
        of_reads = self._steps.reads(ends - begins, num_read)
        inputs = self._model.embed(batch.token_ids.clamp(max=self._last_id))
        return self._model.forward(inputs, batch.rows.positions, self._steps.attention, of_reads)
