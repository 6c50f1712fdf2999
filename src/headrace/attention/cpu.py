"""Attention by the native CPU kernels, through the kernel registry.

Owns the paged pool in the kernels' layout (pages of 16) and the page table of a step. With a page size of 1, slots are scattered over
these pages and are collected for each layer (`CollectedPages`). Does not own the kernels. Runs in the thread that runs the model.
"""

from copy import copy
from dataclasses import replace

import torch

from headrace import kernels
from headrace.attention.base import (
    AttentionBackend,
    AttentionLayerSpec,
    KvPool,
    KvShape,
    PagedKv,
    ReadTokens,
    StepAttention,
    StepRows,
)
from headrace.config.resolve import AttentionNeeds
from headrace.kernels.cpu import why_not
from headrace.kernels.packing import MAX_INT_HEAD_DIM, int_parts


class CollectedPages:
    """The keys and values of a step in pages of 16, one sequence after the other; one layer at a time.

    They are copied, not computed again, so the bits do not depend on the page size. It costs a copy of all of them per layer.
    k, v: in the layout of `kernels.kv_cache_shapes`. page_table: int32[num_rows, max_pages], into them.
    """

    def __init__(self, shape: KvShape) -> None:
        self._shape = shape
        self.k, self.v = self._pages(0)
        self.page_table = torch.empty(0, 0, dtype=torch.int32)

    def prepare(self, rows: StepRows) -> None:
        """Called once per step: compute the source and destination of each token."""
        page = kernels.PAGE_SIZE
        lengths = [start + count for start, count in zip(rows.starts, rows.counts, strict=True)]
        num_pages = [-(-length // page) for length in lengths]
        if sum(num_pages) > self.k.shape[0]:
            # With some room to grow, so that not every decode step allocates memory.
            self.k, self.v = self._pages(sum(num_pages) * 9 // 8)
        self.page_table = torch.zeros(len(lengths), max(num_pages, default=0), dtype=torch.int32)
        first, put = 0, []
        for row, (length, pages) in enumerate(zip(lengths, num_pages, strict=True)):
            self.page_table[row, :pages] = torch.arange(first, first + pages, dtype=torch.int32)
            put.append(torch.arange(first * page, first * page + length, dtype=torch.int32))
            first += pages
        self._put = torch.cat(put)
        self._taken = torch.cat([rows.slots[row, :length] for row, length in enumerate(lengths)])

    def collect(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Fill `k` and `v` from the caches of a layer, which already contain the step's own tokens."""
        kernels.write_kv(*kernels.gather_kv(k_cache, v_cache, self._taken), self.k, self.v, self._put)
        if not self._shape.dtype.is_floating_point:
            # Copy the bytes: a recomputed scale could differ in its last bit.
            taken, put = _scale_places(self._taken), _scale_places(self._put)
            stored, collected = int_parts(k_cache, v_cache), int_parts(self.k, self.v)
            collected.k_scales[put] = stored.k_scales[taken]
            collected.v_scales[put] = stored.v_scales[taken]

    def _pages(self, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._shape
        k_size, v_size = kernels.kv_cache_shapes(num_pages, shape.num_kv_heads, shape.head_dim, shape.dtype)
        return torch.zeros(k_size, dtype=shape.dtype), torch.zeros(v_size, dtype=shape.dtype)


def _scale_places(slots: torch.Tensor) -> tuple[torch.Tensor, slice, torch.Tensor]:
    """Index of the slots' scales in the views of `int_parts`."""
    return slots.long() // kernels.PAGE_SIZE, slice(None), slots.long() % kernels.PAGE_SIZE


class CpuAttention(AttentionBackend):
    """Native paged attention; one kernel for prefill and decode."""

    name = "cpu"
    page_size = kernels.PAGE_SIZE
    verified = frozenset({"cpu"})
    sees_ahead = True

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = []
        if needs.device != "cpu":
            reasons.append(f"it runs on CPU only, not on {needs.device}")
        elif not needs.native_kernels:
            reasons.append(why_not() or "native kernels are disabled")
        if needs.kv_cache_dtype not in ("bfloat16", "float32", "int16", "int8"):
            reasons.append(f"its KV cache is bfloat16, float32, int16 or int8, not {needs.kv_cache_dtype}")
        if needs.head_dim % 16:
            reasons.append(f"head_dim must be a multiple of 16, not {needs.head_dim}")
        if needs.kv_cache_dtype in ("int16", "int8") and needs.head_dim > MAX_INT_HEAD_DIM:
            reasons.append(
                f"head_dim must be at most {MAX_INT_HEAD_DIM} for a KV cache in {needs.kv_cache_dtype}, not {needs.head_dim}"
            )
        return reasons

    def __init__(self, *, deterministic: bool = False, rounded: bool = False) -> None:
        super().__init__(deterministic=deterministic, rounded=rounded)
        self._kv: PagedKv
        self._collected: CollectedPages | None = None

    def make_kv_pool(self, shape: KvShape, num_slots: int, page_size: int, device: torch.device) -> KvPool:
        """Zero-filled pages of 16 tokens, whatever the page size, in the layout of `kernels.kv_cache_shapes`."""
        assert page_size in (1, kernels.PAGE_SIZE), page_size
        assert num_slots % page_size == 0, (num_slots, page_size)
        num_pages = -(-num_slots // kernels.PAGE_SIZE)
        k_shape, v_shape = kernels.kv_cache_shapes(num_pages, shape.num_kv_heads, shape.head_dim, shape.dtype)
        self._shape = shape
        self._collected = None if page_size == kernels.PAGE_SIZE else CollectedPages(shape)
        pool = KvPool.zeros(shape, (k_shape, v_shape), num_slots, page_size, device)
        rounded = self.rounded and shape.dtype == torch.bfloat16
        self._kv = PagedKv(pool, _no_rows(), torch.empty(0, 0, dtype=torch.int32), rounded)
        return pool

    def paged_kv(self) -> PagedKv | None:
        """The pool and the step; None with pages of 1."""
        return self._kv if self._collected is None else None

    def prepare(self, rows: StepRows) -> None:
        """Page ids of each sequence, int32[num_rows, max_pages]."""
        self._kv.rows = rows
        if self._collected is not None:
            self._collected.prepare(rows)
        elif rows.pages is not None:
            self._kv.page_table = rows.pages
        else:
            self._kv.page_table = torch.from_numpy(rows.slots.numpy()[:, :: kernels.PAGE_SIZE] // kernels.PAGE_SIZE)

    def part(self, tokens: slice) -> tuple[StepAttention, slice]:
        own, rows = self._kv.rows.part(tokens)
        view = copy(self)
        view._kv = replace(self._kv)
        view._collected = None if self._collected is None else CollectedPages(self._shape)
        view.prepare(own)
        return view, rows

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec) -> torch.Tensor:
        rows = self._kv.rows
        return self._forward(q, k, v, layer, rows.row_starts, rows.last_keys)

    def forward_read(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec, reads: ReadTokens
    ) -> torch.Tensor:
        last_keys = self._kv.rows.last_keys
        last_keys = None if last_keys is None else last_keys[reads.index]
        return self._forward(q[reads.index], k, v, layer, torch.tensor(reads.starts, dtype=torch.int32), last_keys)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayerSpec,
        q_starts: torch.Tensor,
        last_keys: torch.Tensor | None,
    ) -> torch.Tensor:
        """q_starts: int32[num_rows + 1], where the queries of each row begin: its last positions. last_keys: of the queries, see `StepRows`."""
        rows = self._kv.rows
        k_cache, v_cache = self._kv.pool.k[layer.layer_id], self._kv.pool.v[layer.layer_id]
        kernels.write_kv(k, v, k_cache, v_cache, rows.out_slots)
        page_table = self._kv.page_table
        if self._collected is not None:
            self._collected.collect(k_cache, v_cache)
            k_cache, v_cache, page_table = self._collected.k, self._collected.v, self._collected.page_table
        out = kernels.paged_attention(
            q,
            k_cache,
            v_cache,
            page_table,
            rows.seq_lens,
            q_starts,
            layer.scale,
            window=layer.sliding_window,
            softcap=layer.soft_cap,
            rounded=self._kv.rounded,
            last_keys=last_keys,
        )
        return out.flatten(1)


def _no_rows() -> StepRows:
    nothing = torch.empty(0, dtype=torch.int32)
    return StepRows([], [], nothing, nothing, torch.zeros(1, dtype=torch.int32), nothing, nothing.view(0, 0))
