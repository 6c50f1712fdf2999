"""Steps of a model that guesses, over the tables of the target: its KV cache has the same slots. Used by the thread that runs the steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from headrace.attention.base import AttentionBackend
from headrace.execution.forward_batch import ForwardBatch, cumulative, token_places
from headrace.execution.sequence_table import HostTables, SequenceTable
from headrace.messages.step import Int32Array, ModelWorkerBatch
from headrace.sampling.sampler import Sampler
from headrace.speculative.pace import FIRST_CHANCE, learnt

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


class DraftSteps:
    """attention: with the KV pool of the model that guesses. table, sampler: the target's, on the CPU."""

    def __init__(self, attention: AttentionBackend, table: SequenceTable, sampler: Sampler) -> None:
        assert table.host is not None, "drafts of a model on a device"
        self.attention = attention
        self._table = table
        self._host: HostTables = table.host
        self._sampler = sampler

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

    def guess(self, logits: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> list[int]:
        """Draw the token of each sequence at its position, and write it to the token buffer.

        logits: float32[rows, n]; ids from n on are impossible.
        """
        missing = self._sampler.vocab_size - logits.shape[1]
        if missing:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        ids = self._sampler.guess(logits, seqs.tolist(), positions.tolist()).numpy()
        inside = positions <= self._table.context_length
        self._host.tokens[seqs[inside], positions[inside]] = ids[inside]
        return [int(token_id) for token_id in ids]


def _places(seqs: Int32Array, starts: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    return token_places(seqs, starts, counts, cumulative(counts))
