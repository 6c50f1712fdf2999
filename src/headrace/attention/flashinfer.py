"""Attention by the FlashInfer library, an optional package (`pip install flashinfer-python`).

Written from FlashInfer's documentation (0.6) and never run. docs/gpu-worklist.md says how to verify it.

Owns a pool of pages [num_pages, page_size, num_kv_heads, head_dim] per layer (FlashInfer's NHD layout) and the plans of a step: one for each kind
of layer (window, soft cap, scale), made at the step's first layer of that kind. Steps with one token per row use the decode
wrapper, others the prefill wrapper. A plan takes lengths from the host, so a step cannot be captured in a CUDA graph. Runs in the
thread that runs the model.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from headrace.attention.base import (
    AttentionBackend,
    AttentionLayerSpec,
    KvPool,
    KvShape,
    StepRows,
    reasons_against_fp8,
)
from headrace.config.resolve import AttentionNeeds
from headrace.kernels import PAGE_SIZE

WORKSPACE_BYTES = 256 << 20
"""Workspace for the partial results of split sequences; shared by all wrappers, which run one after another."""

_HEAD_DIMS = (64, 128, 256)
_Kind = tuple[bool, int, float, float]


class FlashInferAttention(AttentionBackend):
    """FlashInfer's paged decode and prefill wrappers."""

    name = "flashinfer"
    page_size = PAGE_SIZE

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = []
        if needs.device != "cuda":
            reasons.append(f"it runs on CUDA only, not on {needs.device}")
        if find_spec("flashinfer") is None:
            reasons.append("the package flashinfer-python is not installed (pip install flashinfer-python)")
        if needs.head_dim not in _HEAD_DIMS:
            reasons.append(f"head_dim must be one of {_HEAD_DIMS}, not {needs.head_dim}")
        if needs.kv_cache_dtype not in ("bfloat16", "float16", "float8_e4m3fn"):
            reasons.append(f"its KV cache is bfloat16, float16 or fp8_e4m3, not {needs.kv_cache_dtype}")
        if needs.kv_cache_dtype == "float8_e4m3fn":
            reasons += reasons_against_fp8(needs.device)
        if needs.deterministic:
            reasons.append("its splits depend on the batch")
        return reasons

    def __init__(self, *, deterministic: bool = False, rounded: bool = False) -> None:
        super().__init__(deterministic=deterministic, rounded=rounded)
        self._library: Any = import_module("flashinfer")
        self._pool: KvPool
        self._rows: StepRows
        self._workspace: torch.Tensor
        self._wrappers: dict[_Kind, Any] = {}
        self._planned: set[_Kind] = set()
        self._pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

    def make_kv_pool(self, shape: KvShape, num_slots: int, page_size: int, device: torch.device) -> KvPool:
        """Zero-filled pages for K and for V of each layer."""
        assert num_slots % page_size == 0, (num_slots, page_size)
        size = (num_slots // page_size, page_size, shape.num_kv_heads, shape.head_dim)
        self._pool = KvPool.zeros(shape, (size, size), num_slots, page_size, device)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._pool

    def prepare(self, rows: StepRows) -> None:
        """The step's pages in one list, as the library needs them, from lengths known to the host."""
        self._rows = rows
        self._planned.clear()
        page_size, device = self._pool.page_size, rows.out_slots.device
        lengths = np.array(rows.starts) + np.array(rows.counts)
        num_pages = -(-lengths // page_size)
        page_starts = np.concatenate(([0], np.cumsum(num_pages)))
        at_rows = np.repeat(np.arange(len(lengths)), num_pages)
        columns = np.arange(page_starts[-1]) - np.repeat(page_starts[:-1], num_pages)
        if rows.pages is None:
            columns *= page_size
        table = rows.slots if rows.pages is None else rows.pages
        pages = table[_upload(at_rows, device), _upload(columns, device)]
        if rows.pages is None:
            pages = torch.div(pages, page_size, rounding_mode="floor")
        row_starts = np.concatenate(([0], np.cumsum(rows.counts)))
        self._pages = (
            torch.from_numpy(row_starts.astype(np.int32)),
            torch.from_numpy(page_starts.astype(np.int32)),
            pages.to(torch.int32),
            torch.from_numpy((lengths - (num_pages - 1) * page_size).astype(np.int32)),
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec) -> torch.Tensor:
        k_pages, v_pages = self._pool.k[layer.layer_id], self._pool.v[layer.layer_id]
        slots = self._rows.out_slots.long()
        k_pages.view(-1, *k_pages.shape[2:])[slots] = k.to(k_pages.dtype)
        v_pages.view(-1, *v_pages.shape[2:])[slots] = v.to(v_pages.dtype)
        out: torch.Tensor = self._planned_wrapper(q, k_pages.dtype, layer).run(q.contiguous(), (k_pages, v_pages))
        return out.reshape(q.shape[0], -1)

    def _planned_wrapper(self, q: torch.Tensor, kv_dtype: torch.dtype, layer: AttentionLayerSpec) -> Any:
        """The wrapper for this kind of layer, planned for this step."""
        is_decode = all(count == 1 for count in self._rows.counts)
        kind = (is_decode, layer.sliding_window, layer.soft_cap, layer.scale)
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            if is_decode:
                wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, "NHD", use_tensor_cores=layer.num_q_heads >= 4 * layer.num_kv_heads
                )
            else:
                wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[kind] = wrapper
        if kind not in self._planned:
            self._planned.add(kind)
            row_starts, page_starts, pages, last_page_lengths = self._pages
            options: dict[str, Any] = {
                "window_left": layer.sliding_window - 1,  # -1: all
                "logits_soft_cap": layer.soft_cap,
                "sm_scale": layer.scale,
                "q_data_type": q.dtype,
                "kv_data_type": kv_dtype,
            }
            sizes = (layer.num_q_heads, layer.num_kv_heads, layer.head_dim, self._pool.page_size)
            if is_decode:
                wrapper.plan(page_starts, pages, last_page_lengths, *sizes, **options)
            else:
                wrapper.plan(row_starts, page_starts, pages, last_page_lengths, *sizes, causal=True, **options)
        return wrapper


def _upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
