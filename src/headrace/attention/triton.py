"""Attention on NVIDIA GPUs by the project's Triton kernels.

Owns the pool (one row of slots [num_slots, num_kv_heads, head_dim] per layer, for any page size) and what the layers of a step share. Does
not own the kernels (`headrace.kernels.triton.attention`). Runs in the thread that runs the model. `forward` launches kernels and
waits for none; everything that varies within a batch-size bucket is read on the device, so that a decode step can be captured.
"""

import torch

from headrace.attention.base import AttentionLayerSpec, KvPool, KvShape, PagedKv, StepRows, zero_filled
from headrace.kernels.triton import attention as kernels

HOST_PROCESSORS = 4
"""What the interpreter on the CPU takes for the number of processors of a GPU."""


class TritonAttention:
    """Split-key decode and tiled extend over a pool of slots."""

    name = "triton"

    def __init__(self, *, deterministic: bool) -> None:
        """deterministic: bits of a row depend on its position and its own sequence alone, at some cost in speed."""
        self._deterministic = deterministic
        self._pool: KvPool
        self._plan: kernels.Plan
        self._out_slots: torch.Tensor
        self._positions: torch.Tensor
        self._num_processors: int

    def make_kv_pool(self, shape: KvShape, num_slots: int, page_size: int, device: torch.device) -> KvPool:
        """Zero-filled [num_slots, num_kv_heads, head_dim] for K and for V of each layer."""
        size = (num_slots, shape.num_kv_heads, shape.head_dim)
        self._pool = KvPool(
            k=[zero_filled(size, shape.dtype, device) for _ in range(shape.num_layers)],
            v=[zero_filled(size, shape.dtype, device) for _ in range(shape.num_layers)],
            num_slots=num_slots,
            page_size=page_size,
        )
        self._num_processors = HOST_PROCESSORS
        if device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        return self._pool

    def prepare(self, rows: StepRows) -> None:
        """Which kernels the step needs, from the host's counts; the rest stays on the device."""
        table, page_size = (rows.slots, 1) if rows.pages is None else (rows.pages, self._pool.page_size)
        self._out_slots = rows.out_slots
        self._positions = rows.positions
        self._plan = kernels.Plan(
            table=table,
            page_size=page_size,
            seq_lens=rows.seq_lens,
            row_starts=rows.row_starts,
            num_tokens=rows.positions.shape[0],
            max_keys=table.shape[1] * page_size,
            has_single=1 in rows.counts,
            has_longer=any(count > 1 for count in rows.counts),
            deterministic=self._deterministic,
            num_processors=self._num_processors,
        )

    def paged_kv(self) -> PagedKv | None:
        """None: no call runs all layers at once."""
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        k_pool, v_pool = self._pool.k[layer.layer_id], self._pool.v[layer.layer_id]
        kernels.write_kv(k, v, k_pool, v_pool, self._out_slots)
        return self._attend(q, k_pool, v_pool, layer)

    def forward_rotating(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """See `RotatingBackend.forward_rotating`."""
        k_pool, v_pool = self._pool.k[layer.layer_id], self._pool.v[layer.layer_id]
        kernels.rotate_write_kv(q, k, v, self._positions, cos, sin, k_pool, v_pool, self._out_slots)
        return self._attend(q, k_pool, v_pool, layer)

    def _attend(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layer: AttentionLayerSpec
    ) -> torch.Tensor:
        out = kernels.attend(
            q, k_pool, v_pool, self._plan, layer.scale, window=layer.sliding_window, soft_cap=layer.soft_cap
        )
        return out.view(q.shape[0], -1)
