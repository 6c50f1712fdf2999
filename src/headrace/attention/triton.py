"""Attention on NVIDIA GPUs with Headrace's Triton kernels.

Owns the pool (one row of slots [num_slots, num_kv_heads, head_dim] per layer, for any page size) and what the layers of a step share. Does
not own the kernels (`headrace.kernels.triton.attention`). Runs in the thread that runs the model. `forward` launches kernels without
waiting; everything that varies within a batch-size bucket is read on the device, so that a decode step can be captured.

Compared with torch on an H100 (docs/gpu-worklist.md, "Verified"), and with float64 under Triton's interpreter.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from headrace.attention.base import (
    AttentionLayerSpec,
    HeadNorms,
    KvPool,
    KvShape,
    RotatingBackend,
    StepRows,
    reasons_against_fp8,
)
from headrace.config.resolve import AttentionNeeds
from headrace.kernels.registry import triton_why_not

if TYPE_CHECKING:
    from headrace.kernels.triton.attention import NewKeys, Plan

HOST_PROCESSORS = 4
"""Number of GPU processors assumed by the interpreter on the CPU."""


_HEAD_DIMS = (16, 256)
"""Smallest and largest supported head_dim."""


class TritonAttention(RotatingBackend):
    """Split-key decode and tiled extend over a pool of slots."""

    name = "triton"
    captures = True
    verified = frozenset({"cuda"})

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reason = triton_why_not(needs.device)
        reasons = [reason] if reason else []
        least, most = _HEAD_DIMS
        if not least <= needs.head_dim <= most or needs.head_dim % 8:
            reasons.append(f"head_dim must be a multiple of 8 from {least} to {most}, not {needs.head_dim}")
        if needs.kv_cache_dtype in ("int16", "int8"):
            reasons.append(f"it has no {needs.kv_cache_dtype} KV cache; fp8_e4m3 is as small as int8")
        if needs.kv_cache_dtype == "float8_e4m3fn":
            reasons += reasons_against_fp8(needs.device)
        if needs.device == "cpu" and needs.kv_cache_dtype == "bfloat16":
            reasons.append("Triton's interpreter gives wrong results in bfloat16; use --kv-cache-dtype float32")
        return reasons

    def __init__(self, *, deterministic: bool = False, rounded: bool = False) -> None:
        super().__init__(deterministic=deterministic, rounded=rounded)
        # Imported here and not at the top: Triton may be missing where another backend is used.
        self._kernels: Any = import_module("headrace.kernels.triton.attention")
        self.pool: KvPool
        self._plan: Plan
        self._decode_writes: bool
        self._out_slots: torch.Tensor
        self._positions: torch.Tensor
        self._num_processors: int

    def make_kv_pool(self, shape: KvShape, num_slots: int, page_size: int, device: torch.device) -> KvPool:
        """Zero-filled [num_slots, num_kv_heads, head_dim] for K and for V of each layer."""
        size = (num_slots, shape.num_kv_heads, shape.head_dim)
        self.pool = KvPool.zeros(shape, (size, size), num_slots, page_size, device)
        self._num_processors = HOST_PROCESSORS
        if device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        return self.pool

    def prepare(self, rows: StepRows) -> None:
        """Choose the kernels of the step from the host's counts; everything else stays on the device."""
        table, page_size = (rows.slots, 1) if rows.pages is None else (rows.pages, self.pool.page_size)
        self._out_slots = rows.out_slots
        self._positions = rows.positions
        self._plan = self._kernels.Plan(
            table=table,
            page_size=page_size,
            seq_lens=rows.seq_lens,
            row_starts=rows.row_starts,
            num_tokens=rows.positions.shape[0],
            max_keys=table.shape[1] * page_size,
            has_single=1 in rows.counts,
            has_longer=any(count > 1 for count in rows.counts),
            deterministic=self.deterministic,
            num_processors=self._num_processors,
        )
        # Not with bits that must not depend on the batch: a key would be rotated by another kernel than in a prompt.
        self._decode_writes = not (self._plan.has_longer or self.deterministic or rows.share_sequences)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec) -> torch.Tensor:
        k_pool, v_pool = self.pool.k[layer.layer_id], self.pool.v[layer.layer_id]
        self._kernels.write_kv(k, v, k_pool, v_pool, self._out_slots)
        return self._attend(q, k_pool, v_pool, layer)

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
        k_pool, v_pool = self.pool.k[layer.layer_id], self.pool.v[layer.layer_id]
        new = self._kernels.NewKeys(k, v, self._positions, cos, sin, self._out_slots, norms)
        if self._decode_writes:
            return self._attend(q, k_pool, v_pool, layer, new)
        self._kernels.rotate_write_kv(q, *new[:5], k_pool, v_pool, self._out_slots, norms)
        return self._attend(q, k_pool, v_pool, layer)

    def _attend(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        layer: AttentionLayerSpec,
        new: "NewKeys | None" = None,
    ) -> torch.Tensor:
        out: torch.Tensor = self._kernels.attend(
            q, k_pool, v_pool, self._plan, layer.scale, window=layer.sliding_window, soft_cap=layer.soft_cap, new=new
        )
        return out.view(q.shape[0], -1)
