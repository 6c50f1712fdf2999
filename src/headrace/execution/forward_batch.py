"""The runner's tables of sequences, and one step as tensors: the plan, with the tokens and slots from the tables.

Owns the token buffer (which allows the next step to be planned before this one's tokens are known to the host), the KV slot of each position,
`ForwardBatch`, and the choice of the tokens that are read (`last_tokens`). Does not allocate slots: the scheduler does. Used by the thread that runs
the steps. On the CPU a step is made with numpy and as few calls as possible: between two steps the CPU caches are full of weights, so that each call
costs several times as much as in a tight loop.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from headrace.attention.base import OwnRows, ReadTokens, StepRows
from headrace.execution.device import Device, upload_parts
from headrace.messages.step import Int32Array, ModelWorkerBatch, NewSequence


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
    sparse_from: given, positions after the prompt from this one on attend to few keys (`StepRows.sparse_first`).
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
        sparse_from: int | None = None,
    ) -> None:
        assert not page_size or link is None, (page_size, device)
        self.max_seqs = max_seqs
        self.spare = max_seqs
        self.link = link
        self.context_length = context_length
        self.page_size = page_size
        self.part = part
        self.first_slot = first_slot
        self.sparse_from = sparse_from
        self.sparse_first = np.zeros(max_seqs, np.int32)
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
        self.sparse_first[new.seq] = max(new.num_prompt_tokens, self.sparse_from or 0)
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


_NO_SLOTS = torch.empty(0, 0, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step's inputs on the model's device.

    token_ids: int64[num_tokens]; ids at positions with input embeddings are placeholders. starts, counts: of the plan's rows; row_starts:
    where each begins among the tokens, and their number. rows: for attention. own: which of the plan's rows these are, where ranks have the KV
    of different sequences; None = all.
    """

    token_ids: torch.Tensor
    starts: list[int]
    counts: list[int]
    row_starts: list[int]
    rows: StepRows
    own: OwnRows | None = None

    @classmethod
    def from_plan(cls, plan: ModelWorkerBatch, table: SequenceTable) -> "ForwardBatch":
        """Look up the plan's tokens and slots, and record where this step's KV goes."""
        if plan.part_starts:
            return cls._of_parts(plan, table)
        starts = plan.starts.tolist()
        if len(starts) == plan.num_tokens:
            counts = [1] * len(starts)
            longest = max(starts, default=-1) + 1
            row_starts, row_starts_on_host = _single_tokens(len(starts))
            token_rows, positions, seq_lens = plan.seqs, plan.starts, plan.starts + 1
        else:
            counts = plan.counts.tolist()
            seq_lens = plan.starts + plan.counts
            longest = int(seq_lens.max(initial=0))
            starts_of_rows = cumulative(plan.counts)
            row_starts, row_starts_on_host = torch.from_numpy(starts_of_rows), starts_of_rows.tolist()
            token_rows, positions = token_places(plan.seqs, plan.starts, plan.counts, starts_of_rows)
        assert row_starts_on_host[-1] == plan.num_tokens, (counts, plan.num_tokens)
        assert longest <= table.context_length, (longest, table.context_length)
        if table.host is None:
            assert table.link is not None, "tables of a device without a link to it"
            at_rows, at_positions, seqs = upload_parts(
                table.link, [part.astype(np.int64) for part in (token_rows, positions, plan.seqs)]
            )
            *places, out_slots, row_starts = upload_parts(
                table.link, [positions, seq_lens, plan.out_slots, row_starts.numpy()]
            )
            table.slots.index_put_((at_rows, at_positions), out_slots)
            token_ids = table.tokens[at_rows, at_positions]
            slots, pages = table.slots[:, :longest].index_select(0, seqs), None
        else:
            token_ids = torch.from_numpy(table.host.tokens[token_rows, positions])
            slots, pages = _slots_and_pages(plan, table.host, table.page_size, token_rows, positions, longest)
            out_slots = torch.from_numpy(plan.out_slots)
            places = [torch.from_numpy(part) for part in (positions, seq_lens)]
        rows = StepRows(
            starts=starts,
            counts=counts,
            positions=places[0],
            seq_lens=places[1],
            row_starts=row_starts,
            out_slots=out_slots,
            slots=slots,
            pages=pages,
            sparse_first=None if table.sparse_from is None else torch.from_numpy(table.sparse_first[plan.seqs]),
        )
        return cls(token_ids, starts, counts, row_starts_on_host, rows)

    @classmethod
    def of_entered(
        cls, seqs: Int32Array, starts: Int32Array, counts: Int32Array, table: SequenceTable, link: Device
    ) -> "ForwardBatch":
        """Positions starts[i] .. starts[i] + counts[i] - 1 of sequence seqs[i], whose slots are in the tables, which are on a device."""
        starts_of_rows, seq_lens = cumulative(counts), starts + counts
        token_rows, positions = token_places(seqs, starts, counts, starts_of_rows)
        at_rows, at_positions, at_seqs = upload_parts(
            link, [part.astype(np.int64) for part in (token_rows, positions, seqs)]
        )
        of_tokens, of_rows, row_starts = upload_parts(link, [positions, seq_lens, starts_of_rows])
        rows = StepRows(
            starts=starts.tolist(),
            counts=counts.tolist(),
            positions=of_tokens,
            seq_lens=of_rows,
            row_starts=row_starts,
            out_slots=table.slots[at_rows, at_positions],
            slots=table.slots[:, : int(seq_lens.max(initial=0))].index_select(0, at_seqs),
        )
        return cls(table.tokens[at_rows, at_positions], rows.starts, rows.counts, starts_of_rows.tolist(), rows)

    @classmethod
    def _of_parts(cls, plan: ModelWorkerBatch, table: SequenceTable) -> "ForwardBatch":
        """Of a plan whose KV is on several ranks: the tokens of all rows, and what attention needs of its own."""
        assert table.host is not None, "parts of the KV cache on a device"
        starts_of_rows = cumulative(plan.counts)
        row_starts = starts_of_rows.tolist()
        begin, end = plan.part_starts[table.part : table.part + 2]
        own = OwnRows(slice(begin, end), slice(row_starts[begin], row_starts[end]))
        token_ids = torch.from_numpy(
            table.host.tokens[token_places(plan.seqs, plan.starts, plan.counts, starts_of_rows)]
        )
        rows = cls.from_plan(_part(plan, own, table.first_slot), table).rows
        return cls(token_ids, plan.starts.tolist(), plan.counts.tolist(), row_starts, rows, own)


def cumulative(counts: Int32Array) -> Int32Array:
    """int32[n + 1]: where each row begins among the tokens, and their number."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def token_places(
    seqs: Int32Array, starts: Int32Array, counts: Int32Array, starts_of_rows: Int32Array
) -> tuple[Int32Array, Int32Array]:
    """The row in the tables and the position of each token. starts_of_rows: `cumulative` of the counts."""
    positions = np.arange(starts_of_rows[-1], dtype=np.int32)
    positions += np.repeat(starts - starts_of_rows[:-1], counts)
    return np.repeat(seqs, counts), positions


def _part(plan: ModelWorkerBatch, own: OwnRows, first_slot: int) -> ModelWorkerBatch:
    """The plan of these rows alone, over a pool whose slot 0 is `first_slot` of the plan."""
    rows, tokens = own.rows, own.tokens
    return replace(
        plan,
        seqs=plan.seqs[rows],
        starts=plan.starts[rows],
        counts=plan.counts[rows],
        num_logits=plan.num_logits[rows],
        out_slots=plan.out_slots[tokens] - first_slot,
        part_starts=(),
    )


def last_tokens(counts: Int32Array, num_read: Int32Array, device: torch.device) -> ReadTokens | None:
    """The last num_read[r] of the counts[r] tokens of each row r; None if that is every token of the step."""
    if num_read.sum() == counts.sum():
        return None
    starts = np.zeros(len(num_read) + 1, dtype=np.int64)
    np.cumsum(num_read, out=starts[1:])
    ends = np.cumsum(counts, dtype=np.int64)
    index = np.arange(starts[-1]) + np.repeat(ends - starts[1:], num_read)
    return ReadTokens(torch.from_numpy(index).to(device), starts.tolist())


def _slots_and_pages(
    plan: ModelWorkerBatch,
    host: HostTables,
    page_size: int,
    token_rows: Int32Array,
    positions: Int32Array,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Enter the step's slots in the tables. Returns them in the form of `StepRows`."""
    host.enter_slots(token_rows, positions, plan.out_slots, page_size)
    if not page_size:
        return torch.from_numpy(host.slots[plan.seqs, :longest]), None
    num_pages = -(-longest // page_size)
    return _NO_SLOTS, torch.from_numpy(host.pages[:, :num_pages].take(plan.seqs, axis=0))


@lru_cache(maxsize=1024)
def _single_tokens(num_rows: int) -> tuple[torch.Tensor, list[int]]:
    """`row_starts` of a step with one token per row, as a tensor on the CPU and as a list. Read-only."""
    row_starts = list(range(num_rows + 1))
    return torch.tensor(row_starts, dtype=torch.int32), row_starts


PAGE = 16
"""Tokens of a page of the KV cache of a window."""


def window_rows(num_tokens: int, start: int = 0) -> StepRows:
    """The step of one sequence from its position `start`, in the slots 0, 1, ... of its own KV cache, on CPU."""
    slots = torch.arange(start + num_tokens, dtype=torch.int32)
    return StepRows(
        starts=[start],
        counts=[num_tokens],
        positions=slots[start:],
        seq_lens=torch.tensor([start + num_tokens], dtype=torch.int32),
        row_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        out_slots=slots[start:],
        slots=slots.unsqueeze(0),
    )
