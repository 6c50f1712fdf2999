"""Attention by the native CPU kernels, through the kernel registry.

Owns the paged pool in the kernels' layout (pages of 16) and the page table of a step. Does not own the kernels. Runs in the thread
that runs the model.
"""

import torch

from headrace import kernels
from headrace.attention.base import AttentionLayerSpec, KvPool, KvShape, StepRows, zero_filled


class CpuAttention:
    """Native paged attention; one kernel for prefill and decode."""

    name = "cpu"

    def __init__(self) -> None:
        self._pool: KvPool
        self._rows: StepRows
        self._page_table: torch.Tensor

    def make_kv_pool(self, shape: KvShape, num_slots: int, page_size: int, device: torch.device) -> KvPool:
        """Zero-filled pages of 16 tokens in the layout of `kernels.kv_cache_shapes`."""
        assert page_size == kernels.PAGE_SIZE, page_size
        assert num_slots % page_size == 0, (num_slots, page_size)
        k_shape, v_shape = kernels.kv_cache_shapes(
            num_slots // page_size, shape.num_kv_heads, shape.head_dim, shape.dtype
        )
        self._pool = KvPool(
            k=[zero_filled(k_shape, shape.dtype, device) for _ in range(shape.num_layers)],
            v=[zero_filled(v_shape, shape.dtype, device) for _ in range(shape.num_layers)],
            num_slots=num_slots,
            page_size=page_size,
        )
        return self._pool

    def prepare(self, rows: StepRows) -> None:
        """Page ids of each sequence, int32[num_rows, max_pages]."""
        self._rows = rows
        self._page_table = rows.slots[:, :: kernels.PAGE_SIZE] // kernels.PAGE_SIZE

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        k_cache, v_cache = self._pool.k[layer.layer_id], self._pool.v[layer.layer_id]
        kernels.write_kv(k, v, k_cache, v_cache, self._rows.out_slots)
        out = kernels.paged_attention(
            q,
            k_cache,
            v_cache,
            self._page_table,
            self._rows.seq_lens,
            self._rows.row_starts,
            layer.scale,
            window=layer.sliding_window,
            softcap=layer.soft_cap,
        )
        return out.view(q.shape[0], -1)
