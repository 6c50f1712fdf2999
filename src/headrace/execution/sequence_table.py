"""The runner's tables of sequences: tokens, KV slots, and the needs of each sequence.

Owns the token buffer (which allows the next step to be planned before this one's tokens are known to the host) and the KV slot of each
position. Does not allocate slots: the scheduler does. Used by the thread that runs the steps.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from headrace.execution.device import Device
from headrace.messages.step import Int32Array, NewSequence


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What the runner keeps of a `NewSequence`, without its grammar, which the sampler has. input_embeds: see `SequenceTable.add`."""

    new: NewSequence
    input_embeds: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether its only input is token ids and its only output a sampled token."""
        return not self.has_inputs and self.new.task.is_plain

    @property
    def has_inputs(self) -> bool:
        """Whether its prompt gives the first layer more than tokens."""
        return self.input_embeds is not None or bool(self.new.content.spans)


@dataclass(frozen=True, slots=True)
class HostTables:
    """The tables' memory as numpy arrays, if the model is on the CPU: preparing a step with one token per row takes microseconds,
    which torch would spend on every call."""

    tokens: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int32]
    pages: npt.NDArray[np.int32]

    def enter_slots(self, rows: Int32Array, positions: Int32Array, slots: Int32Array, page_size: int) -> None:
        """slots[i] is that of position positions[i] of row rows[i]. page_size: 0 = the table has no pages."""
        if page_size:
            self.pages[rows, positions // page_size] = slots // page_size
        else:
            self.slots[rows, positions] = slots

    def slots_at(self, rows: Int32Array, positions: Int32Array, page_size: int) -> Int32Array:
        """What `enter_slots` was told of them."""
        if not page_size:
            return self.slots[rows, positions]
        return self.pages[rows, positions // page_size] * page_size + positions % page_size


class SequenceTable:
    """Rows 0 .. max_seqs - 1, one per live sequence; rows of ended sequences contain old values until they are reused.

    tokens: int64[max_seqs + 1, context_length + 1]. slots: int32[max_seqs + 1, context_length]. Both on the model's device; the last row,
    `spare`, belongs to no sequence. special: rows whose `SequenceSpec` is not plain. adapted: rows with an adapter.
    link: how values reach a device without waiting; None where the tables are in host memory. host: the same memory; None with a link.
    page_size: given (without a link), the host's pages int32[max_seqs, pages of the context] are kept and the slots are not.
    part: of the KV cache that this rank has, where ranks have different sequences; first_slot: its first slot in the plans, which is slot 0
    here. Of the other ranks' sequences, the slots in the table are of no use.
    """

    def __init__(
        self,
        max_seqs: int,
        context_length: int,
        device: torch.device,
        page_size: int = 0,
        link: Device | None = None,
        part: int = 0,
        first_slot: int = 0,
    ) -> None:
        assert not page_size or link is None, (page_size, device)
        self.max_seqs = max_seqs
        self.spare = max_seqs
        self.link = link
        self.context_length = context_length
        self.page_size = page_size
        self.part = part
        self.first_slot = first_slot
        self.tokens = torch.zeros(max_seqs + 1, context_length + 1, dtype=torch.int64, device=device)
        self.slots = torch.zeros(max_seqs + 1, 0 if page_size else context_length, dtype=torch.int32, device=device)
        num_pages = -(-context_length // page_size) if page_size else 0
        pages = np.zeros((max_seqs, num_pages), np.int32)
        self.host = HostTables(self.tokens.numpy(), self.slots.numpy(), pages) if link is None else None
        self.special: set[int] = set()
        self.adapted: set[int] = set()
        self.specs: dict[int, SequenceSpec] = {}

    def add(self, new: NewSequence, input_embeds: torch.Tensor | None = None) -> None:
        """Take row `new.seq` for a sequence that enters or re-enters.

        input_embeds: [num_prompt_tokens, hidden_size] on the model's device, which replace the embeddings of its prompt's tokens, or None.
        """
        num_tokens, num_cached = len(new.token_ids), len(new.prefix_slots)
        assert 0 <= new.seq < self.max_seqs, (new.seq, self.max_seqs)
        assert num_cached < num_tokens <= self.context_length + 1, (num_cached, num_tokens, self.context_length)
        self.tokens[new.seq, :num_tokens] = self._placed(new.token_ids.astype(np.int64))
        if num_cached and self.page_size and self.host is not None:
            first_slots = new.prefix_slots[:: self.page_size] - self.first_slot
            self.host.pages[new.seq, : len(first_slots)] = first_slots // self.page_size
        elif num_cached:
            self.slots[new.seq, :num_cached] = self._placed(
                (new.prefix_slots - self.first_slot).astype(np.int32, copy=False)
            )
        # A row that has been left must not hold a grammar, which may be large.
        kept = new if new.grammar is None else replace(new, grammar=None)
        spec = self.specs[new.seq] = SequenceSpec(kept, input_embeds)
        if spec.is_plain:
            self.special.discard(new.seq)
        else:
            self.special.add(new.seq)
        if new.lora_id:
            self.adapted.add(new.seq)
        else:
            self.adapted.discard(new.seq)

    def _placed(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values) if self.link is None else self.link.upload(values)
