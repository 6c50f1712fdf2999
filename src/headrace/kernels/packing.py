"""Layouts that kernels and their callers share: packed linear weights and the pages of the KV cache.

Owns the shapes and the reordering of weights at load time. Does not own memory: the KV pool allocates its tensors from
`kv_cache_shapes`, the loader keeps what `pack` returns. Runs in whatever thread loads the model.
"""

from dataclasses import dataclass
from typing import Literal

import torch

PAGE_SIZE = 16
"""Tokens in a page of the KV cache."""

PACKED_COLUMNS = 32
"""Output columns of one block of a packed weight."""

Layout = Literal["native_bf16", "native_f32", "torch"]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer's weight in the layout of the implementation that will run it.

    data: native_bf16: bf16[ceil(n / 32), k, 16, 2], pair j holds columns j and j + 16; native_f32: float32[ceil(n / 32), k, 32];
        torch: [n, k] as given (float32 on CPU). Columns beyond n are 0.
    bias: the native layouts: float32, n rounded up to 32 elements; torch: [n].
    """

    n: int
    k: int
    layout: Layout
    data: torch.Tensor
    bias: torch.Tensor | None


def check_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """ValueError unless weight is [n, k], bfloat16, float16 or float32, and bias [n] or None."""
    if weight.dim() != 2:
        raise ValueError(f"pack_linear: weight must be [n, k], got shape {tuple(weight.shape)}")
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"pack_linear: weight must be bfloat16, float16 or float32, got {weight.dtype}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"pack_linear: bias must be [{weight.shape[0]}], got shape {tuple(bias.shape)}")


def pack_native(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Pack a CPU weight [n, k] for the native kernel. bfloat16 stays bfloat16; float16 widens to float32, which is exact."""
    n, k = weight.shape
    blocks = -(-n // PACKED_COLUMNS)
    padding = blocks * PACKED_COLUMNS - n
    padded_bias = None
    if bias is not None:
        padded_bias = torch.nn.functional.pad(bias.to(torch.float32), (0, padding)).contiguous()
    if weight.dtype == torch.bfloat16:
        padded = torch.nn.functional.pad(weight, (0, 0, 0, padding)) if padding else weight
        data = padded.reshape(blocks, 2, 16, k).permute(0, 3, 2, 1).contiguous()
        return PackedLinear(n, k, "native_bf16", data, padded_bias)
    padded = torch.nn.functional.pad(weight.to(torch.float32), (0, 0, 0, padding))
    data = padded.reshape(blocks, PACKED_COLUMNS, k).permute(0, 2, 1).contiguous()
    return PackedLinear(n, k, "native_f32", data, padded_bias)


def pack_torch(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Keep the weight as it is; on CPU as float32, where the activations are float32."""
    n, k = weight.shape
    if weight.device.type == "cpu":
        weight = weight.to(torch.float32)
        bias = None if bias is None else bias.to(torch.float32)
    return PackedLinear(n, k, "torch", weight.contiguous(), bias)


def kv_cache_shapes(
    num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V cache of one layer. K is transposed within its page, V is not.

    bfloat16: K [num_pages, num_kv_heads, head_dim / 2, 16, 2]; float32: K [num_pages, num_kv_heads, head_dim, 16].
    V [num_pages, num_kv_heads, 16, head_dim]. The owner fills both with zeros before first use.
    ValueError for another dtype or a head_dim that is not a multiple of 16.
    """
    if head_dim <= 0 or head_dim % 16:
        raise ValueError(f"head_dim must be a multiple of 16, got {head_dim}")
    v_shape = (num_pages, num_kv_heads, PAGE_SIZE, head_dim)
    if dtype == torch.bfloat16:
        return (num_pages, num_kv_heads, head_dim // 2, PAGE_SIZE, 2), v_shape
    if dtype == torch.float32:
        return (num_pages, num_kv_heads, head_dim, PAGE_SIZE), v_shape
    raise ValueError(f"the KV cache is bfloat16 or float32, got {dtype}")
