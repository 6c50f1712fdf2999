"""The interface between models and attention: layers, steps, and what a backend must implement.

Owns `AttentionLayerSpec`, `StepRows`, `ReadTokens`, `OwnRows`, `KvPool` and the bases `StepAttention`, `AttentionBackend` and `RotatingBackend`. Does
not own any kernel, and does not choose between backends (`config.resolve` does, by their facts). Used by the thread that runs the model.
"""

import contextlib
import math
import mmap
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch

from headrace import kernels
from headrace.attention.sparsity import DoubleSparsity
from headrace.config.resolve import AttentionNeeds


@dataclass(frozen=True, slots=True)
class AttentionLayerSpec:
    """The constants of attention in one layer.

    scale: factor on q.k. sliding_window: a query at position p sees keys p - sliding_window + 1 .. p; 0 = all.
    soft_cap: scores become soft_cap * tanh(score / soft_cap); 0.0 = no cap.
    """

    layer_id: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of the KV cache: the same for all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers; a head in integers also has a float32 scale."""
        head_bytes = self.head_dim * self.dtype.itemsize + (0 if self.dtype.is_floating_point else 4)
        return 2 * self.num_layers * self.num_kv_heads * head_bytes


@dataclass(frozen=True, slots=True)
class KvPool:
    """The KV cache of all layers, in a backend's layout, zero-filled at start. Slots are 0 .. num_slots - 1."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    num_slots: int
    page_size: int

    @classmethod
    def zeros(
        cls,
        shape: KvShape,
        sizes: tuple[tuple[int, ...], tuple[int, ...]],
        num_slots: int,
        page_size: int,
        device: torch.device,
    ) -> "KvPool":
        """sizes: of the tensors of a layer, for K and for V."""
        k, v = ([zero_filled(size, shape.dtype, device) for _ in range(shape.num_layers)] for size in sizes)
        return cls(k, v, num_slots, page_size)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))


def zero_filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros for a KV cache. On CPU, memory is allocated when it is first written, in huge pages if the system has them for shared memory: an idle
    pool costs almost nothing."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without support for them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The tokens of a step: row r computes positions starts[r] .. starts[r] + counts[r] - 1 of one sequence.

    starts, counts: host integers. Tensors, on the model's device: positions int32[num_tokens], row after row;
    seq_lens int32[num_rows] = starts + counts; row_starts int32[num_rows + 1], cumulative counts; out_slots int32[num_tokens],
    where K and V of each token go; slots int32[num_rows, max(seq_lens)], the slot of each position, undefined beyond seq_lens.
    In a step that is captured in a CUDA graph, `starts` are the largest possible ones and `slots` is as wide; the tensors have the real values.
    pages: int32[num_rows, pages of the longest], contiguous, instead of `slots` (then empty) for a backend with `paged_kv`.
    last_keys: int32[num_tokens], the last position that each token sees, for a backend that `sees_ahead`; at or after its own, and below its row's
    seq_lens. They do not decrease within a row. None = its own.
    sparse_first: int32[num_rows], the first position of each row that attends to few keys, for a pool with `PagedKv.sparsity`. None = no row has one.
    share_sequences: several rows may be positions of one sequence (draft tokens in a graph): K and V of all are written before any attends.
    """

    starts: list[int]
    counts: list[int]
    positions: torch.Tensor
    seq_lens: torch.Tensor
    row_starts: torch.Tensor
    out_slots: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor | None = None
    last_keys: torch.Tensor | None = None
    sparse_first: torch.Tensor | None = None
    share_sequences: bool = False

    def part(self, tokens: slice) -> tuple["StepRows", slice]:
        """Some of the tokens as a step of their own, and which rows these belong to; what comes before in a row must be computed before."""
        ends = list(accumulate(self.counts))
        rows = slice(bisect_right(ends, tokens.start), bisect_left(ends, tokens.stop) + 1)
        starts, counts = self.starts[rows], self.counts[rows]
        before, after = tokens.start - (ends[rows.start] - counts[0]), ends[rows.stop - 1] - tokens.stop
        starts[0] += before
        counts[0] -= before
        counts[-1] -= after
        seq_lens = self.seq_lens[rows].clone()
        seq_lens[-1] -= after
        own = StepRows(
            starts,
            counts,
            self.positions[tokens],
            seq_lens,
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            self.out_slots[tokens],
            self.slots[rows],
            None if self.pages is None else self.pages[rows],
            None if self.last_keys is None else self.last_keys[tokens],
            None if self.sparse_first is None else self.sparse_first[rows],
            self.share_sequences,
        )
        return own, rows


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """The tokens of a step whose hidden states are read: of each row the last ones, from none to all. In the last layer,
    only keys and values of the others are needed.

    index: int64[num_read] on the model's device, ascending, among the step's tokens. starts: host integers [num_rows + 1]; row r has
    index[starts[r] : starts[r + 1]].
    """

    index: torch.Tensor
    starts: list[int]

    def part(self, tokens: slice, rows: slice) -> "ReadTokens":
        """See `StepRows.part`."""
        first, last = (int((self.index < end).sum()) for end in (tokens.start, tokens.stop))
        starts = [min(max(start, first), last) - first for start in self.starts[rows.start : rows.stop + 1]]
        return ReadTokens(self.index[first:last] - tokens.start, starts)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows of a step whose KV this rank has, where ranks have different sequences: it computes attention for their tokens, other ranks for
    the others. rows: among the step's rows; tokens: of these rows, among the step's tokens. Both may be empty.
    """

    rows: slice
    tokens: slice

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.stop) - int(self.tokens.start)

    def of_reads(self, reads: ReadTokens) -> tuple[slice, ReadTokens]:
        """Its own among the tokens that are read, and these as tokens of its own rows."""
        starts = reads.starts[self.rows.start : self.rows.stop + 1]
        place = slice(starts[0], starts[-1])
        return place, ReadTokens(reads.index[place] - self.tokens.start, [start - starts[0] for start in starts])


@dataclass(slots=True)
class PagedKv:
    """A pool in the layout of `headrace.kernels.kv_cache_shapes`, and the step's place in it, for a call that runs all layers.

    rows, page_table (int32[num_rows, max_pages]): of the last prepared step. rounded: see `headrace.kernels.paged_attention`. sparsity: of the call,
    which then writes keys in another order of channels.
    """

    pool: KvPool
    rows: StepRows
    page_table: torch.Tensor
    rounded: bool = False
    sparsity: DoubleSparsity | None = None


class StepAttention(ABC):
    """A model's view of a backend: attention over the prepared step. name: for messages."""

    name: ClassVar[str]

    def paged_kv(self) -> PagedKv | None:
        """The pool for a native call over all layers, used instead of `forward`; None if the pool has another layout."""
        return None

    def part(self, tokens: slice) -> "tuple[StepAttention, slice] | None":
        """A view for some tokens of the prepared step, and which rows these belong to; None if there is no such view."""
        return None

    @abstractmethod
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec) -> torch.Tensor:
        """Write k and v, then causal attention of q over each sequence's whole prefix.

        q [num_tokens, num_q_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]; may be slices of wider rows.
        Returns [num_tokens, num_q_heads * head_dim].
        """

    def forward_read(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec, reads: ReadTokens
    ) -> torch.Tensor:
        """The rows of `forward` that are read, [num_read, num_q_heads * head_dim]. A backend may compute only these."""
        return self.forward(q, k, v, layer)[reads.index]

    def attend_encoder(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        row_starts: torch.Tensor,
        scale: float,
        *,
        window: int = 0,
        rounded: bool = False,
    ) -> torch.Tensor:
        """Attention in both directions within each of the texts that lie one after the other, without a KV cache or a prepared step.

        Arguments and result are those of `kernels.packed_attention`, which computes it unless a backend has a way of its own.
        """
        return kernels.packed_attention(q, k, v, row_starts, scale, window=window, rounded=rounded)


class AttentionBackend(StepAttention):
    """Writes K and V of a step into the pool and attends over it.

    On CPU the bits of an output row depend only on its position and on the sequence's own keys and values, never on the other
    rows, the chunking, or whether it was computed as prefill or decode.

    Facts of a class, used to choose one (`config.resolve.AttentionFacts`):
    name: its name for --attention-backend. page_size: the preferred one, in tokens.
    verified: types of devices on which its results have been compared with the reference; it has never been run on others.
    captures: `prepare` and `forward` of a decode step can be captured in a CUDA graph: they never wait for the device, take lengths
    from tensors, and use the host integers of `StepRows` only as bounds. Rows may be several positions of one sequence: K and V of all rows are
    written before any are read, and a row reads no key after its own position.
    sees_ahead: it follows `StepRows.last_keys`.
    """

    page_size: ClassVar[int] = 1
    verified: ClassVar[frozenset[str]] = frozenset()
    captures: ClassVar[bool] = False
    sees_ahead: ClassVar[bool] = False

    def __init__(self, *, deterministic: bool = False, rounded: bool = False) -> None:
        """A backend without a pool yet.

        deterministic: see `AttentionNeeds`; only for a backend that supports it. rounded: it may round queries and weights to bfloat16
        where the KV cache is bfloat16.
        """
        self.deterministic = deterministic
        self.rounded = rounded

    @classmethod
    @abstractmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        """Why it cannot serve `needs`; empty if it can."""

    @abstractmethod
    def make_kv_pool(self, shape: KvShape, num_slots: int, page_size: int, device: torch.device) -> KvPool:
        """A zero-filled pool; the backend keeps it and uses it from now on. num_slots: a multiple of page_size."""

    @abstractmethod
    def prepare(self, rows: StepRows) -> None:
        """Called once per step, before any layer: prepare what all layers share."""


class HeadNorms(NamedTuple):
    """RMS norms of the heads of q and k. q, k: weights [head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


class RotatingBackend(AttentionBackend):
    """A backend that rotates q and k, and normalises their heads before, in the launch that writes K and V; with other backends the layer does."""

    @abstractmethod
    def forward_rotating(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: AttentionLayerSpec,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """`forward` of q and k, normalised by `norms` if given and rotated by the positions of the step, in the halves convention of
        `headrace.kernels.rotary`.

        cos, sin: float32[max_positions, rotary_dim / 2]. q and k are clobbered.
        """


_FP8_CAPABILITY = (8, 9)
"""Compute capability (major, minor): Ada, Hopper and later."""


def reasons_against_fp8(device: str) -> list[str]:
    """Why devices of this type do not support fp8; empty if they do."""
    if device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        return [
            f"the GPU has no fp8: its compute capability {torch.cuda.get_device_capability()} is below {_FP8_CAPABILITY}"
        ]
    return []
