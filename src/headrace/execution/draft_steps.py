"""Steps of a model that guesses, over the tables of the target: its KV cache has the same slots. Used by the thread that runs the steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from headrace.attention.base import AttentionBackend, ReadTokens
from headrace.execution.device import Device, upload_parts
from headrace.execution.forward_batch import ForwardBatch, cumulative, last_tokens, token_places
from headrace.execution.sequence_table import HostTables, SequenceTable
from headrace.messages.step import Int32Array, ModelWorkerBatch
from headrace.sampling.sampler import Sampler
from headrace.speculative.pace import FIRST_CHANCE, learnt

Guessed = Callable[[], list[int]]
"""Reads the tokens that were guessed."""

_RECOVERY = 0.02
"""How far the chance of a sequence whose guesses do not pay goes back to the first one in a step, until they are tried again."""


@dataclass(slots=True)
class DraftRow:
    """One sequence. chance: see `pace`. tokens: those guessed last."""

    chance: float = FIRST_CHANCE
    tokens: list[int] = field(default_factory=list)

    def learn(self, ids: Sequence[int]) -> None:
        """The tokens that came in place of those that were guessed."""
        if not self.tokens:
            self.chance += _RECOVERY * (FIRST_CHANCE - self.chance)
        for token_id, guessed in zip(ids, self.tokens, strict=False):
            self.chance = learnt(self.chance, token_id == guessed)
            if token_id != guessed:
                break
        self.tokens = []


class Unread:
    """Tokens of the last step that have been guessed, and that the host may not have yet."""

    def __init__(self) -> None:
        self._guessed: list[tuple[Sequence[DraftRow], Guessed]] = []

    def add(self, rows: Sequence[DraftRow], guessed: Guessed) -> None:
        """One more for each of these rows."""
        self._guessed.append((rows, guessed))

    def read(self) -> None:
        """Give the rows theirs. On a device it waits for them, unless a result has come since."""
        for rows, guessed in self._guessed:
            for row, token_id in zip(rows, guessed(), strict=True):
                row.tokens.append(token_id)
        self._guessed.clear()


class DraftSteps:
    """attention: with the KV pool of the model that guesses. table, sampler: the target's."""

    def __init__(self, attention: AttentionBackend, table: SequenceTable, sampler: Sampler) -> None:
        self.attention = attention
        self._table = table
        self._sampler = sampler

    @property
    def _host(self) -> HostTables:
        assert self._table.host is not None, "tables on a device"
        return self._table.host

    def enter_slots(self, plan: ModelWorkerBatch) -> None:
        """Of a step that begins, as the target will, a moment later."""
        places = _places(plan.seqs, plan.starts, plan.counts)
        self._host.enter_slots(*places, plan.out_slots, self._table.page_size)

    def batch(self, plan: ModelWorkerBatch, seqs: Int32Array, begins: Int32Array, ends: Int32Array) -> ForwardBatch:
        """Positions begins[i] .. ends[i] - 1 of sequence seqs[i], whose slots are known; attention is prepared for them. plan: of the step beside
        which they are computed."""
        counts = ends - begins
        slots = self._host.slots_at(*_places(seqs, begins, counts), self._table.page_size)
        num_logits = np.zeros_like(counts)
        own = replace(plan, seqs=seqs, starts=begins, counts=counts, num_logits=num_logits, out_slots=slots, new=())
        batch = ForwardBatch.from_plan(own, self._table)
        self.attention.prepare(batch.rows)
        return batch

    def next_ids(self, seqs: Int32Array, begins: Int32Array, ends: Int32Array) -> torch.Tensor:
        """int64[num_tokens]: of each position of such a batch, the token one position further."""
        rows, positions = _places(seqs, begins, ends - begins)
        return torch.from_numpy(self._host.tokens[rows, positions + 1])

    def reads(self, counts: Int32Array, num_read: Int32Array) -> ReadTokens | None:
        """The last num_read[i] of the counts[i] tokens of each row; None if that is every token."""
        return last_tokens(counts, num_read, torch.device("cpu"))

    def guess(self, logits: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> Guessed:
        """Draw the token of each sequence at its position, and write it to the token buffer.

        logits: float32[rows, n]; ids from n on are impossible.
        """
        ids = self._drawn(logits, seqs, positions).numpy()
        inside = positions <= self._table.context_length
        self._host.tokens[seqs[inside], positions[inside]] = ids[inside]
        drawn = ids.tolist()
        return lambda: drawn

    def _drawn(self, logits: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> torch.Tensor:
        missing = self._sampler.vocab_size - logits.shape[1]
        if missing:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return self._sampler.guess(logits, seqs.tolist(), positions.tolist())


class DeviceDraftSteps(DraftSteps):
    """`DraftSteps` of a model on a device: its steps are queued between those of the target, and nothing waits. link: to the device."""

    def __init__(self, attention: AttentionBackend, table: SequenceTable, sampler: Sampler, link: Device) -> None:
        super().__init__(attention, table, sampler)
        self._link = link

    def enter_slots(self, plan: ModelWorkerBatch) -> None:
        """See `DraftSteps`."""
        rows, positions, slots = self.uploaded(*_places(plan.seqs, plan.starts, plan.counts), plan.out_slots)
        self._table.slots.index_put_((rows, positions), slots.int())

    def batch(self, plan: ModelWorkerBatch, seqs: Int32Array, begins: Int32Array, ends: Int32Array) -> ForwardBatch:
        """See `DraftSteps`."""
        batch = ForwardBatch.of_entered(seqs, begins, ends - begins, self._table, self._link)
        self.attention.prepare(batch.rows)
        return batch

    def next_ids(self, seqs: Int32Array, begins: Int32Array, ends: Int32Array) -> torch.Tensor:
        """See `DraftSteps`."""
        rows, positions = self.uploaded(*_places(seqs, begins, ends - begins))
        return self._table.tokens[rows, positions + 1]

    def reads(self, counts: Int32Array, num_read: Int32Array) -> ReadTokens | None:
        """See `DraftSteps`."""
        found = super().reads(counts, num_read)
        return None if found is None else ReadTokens(self._link.upload(found.index.numpy()), found.starts)

    def guess(self, logits: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> Guessed:
        """See `DraftSteps`. What it returns waits for the device."""
        ids = self._drawn(logits, seqs, positions)
        # What has no place in the buffer goes to a row of no sequence.
        inside = positions <= self._table.context_length
        rows, places = self.uploaded(np.where(inside, seqs, self._table.spare), np.where(inside, positions, 0))
        self._table.tokens.index_put_((rows, places), ids)
        download = self._link.download(ids)
        return lambda: download.wait().tolist()

    def uploaded(self, *parts: Int32Array) -> list[torch.Tensor]:
        """On the device, int64, in one copy."""
        return upload_parts(self._link, [part.astype(np.int64) for part in parts])


def _places(seqs: Int32Array, starts: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    return token_places(seqs, starts, counts, cumulative(counts))
