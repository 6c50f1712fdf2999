"""Layouts that kernels and their callers share: packed linear weights and the pages of the KV cache.

Owns the shapes, the table of layouts and the reordering of float weights at load time. Does not own the layouts of integer weights
(`quantized_packing`) nor memory: the KV pool allocates its tensors from
`kv_cache_shapes`, the loader keeps what `pack` returns. Runs in whatever thread loads the model.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from headrace.checkpoint.quantized_matrix import walsh_hadamard
from headrace.checkpoint.weight_formats import KERNEL_GROUP, WIDE_GROUP, Rounding, Scheme

PAGE_SIZE = 16
"""Tokens in a page of the KV cache."""

PACKED_COLUMNS = 32
"""Output columns of one block of a packed weight."""

Layout = Literal[
    "native_bf16",
    "native_bf16_pairs",
    "native_f32",
    "native_int16",
    "native_int8",
    "native_int8_rotated",
    "native_int8_fast",
    "native_int4",
    "native_int4_min",
    "torch",
    "torch_bf16",
    "torch_int8",
    "torch_int8_rotated",
    "torch_int8_fast",
    "torch_int16",
    "torch_fp8",
    "torch_int4",
]


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """A layout of codes for the native kernels. kernel: its QuantScheme in csrc/cpu/ops.h. minimums: the scales are followed by minimums."""

    kernel: int
    scheme: Scheme
    minimums: bool = False


QUANTIZED_LAYOUTS: dict[Layout, QuantizedLayout] = {
    "native_int8": QuantizedLayout(0, "int8"),
    "native_int8_fast": QuantizedLayout(1, "int8-fast"),
    "native_int4": QuantizedLayout(2, "int4"),
    "native_int4_min": QuantizedLayout(3, "int4", minimums=True),
    "native_int16": QuantizedLayout(4, "int16"),
    "native_int8_rotated": QuantizedLayout(6, "int8-rotated"),
}

QUANT_SCHEMES: dict[str, int] = {
    **{layout: quantized.kernel for layout, quantized in QUANTIZED_LAYOUTS.items()},
    "native_bf16_pairs": 5,
}
"""QuantScheme of csrc/cpu/ops.h, by layout: those whose products round their input."""

ROUNDINGS: dict[Layout, Rounding] = {
    "torch_int8": Rounding(8, KERNEL_GROUP),
    "torch_int8_rotated": Rounding(8, KERNEL_GROUP, rotated=True),
    "torch_int8_fast": Rounding(8, WIDE_GROUP, rotated=True),
    "torch_int16": Rounding(16, WIDE_GROUP),
}
"""How torch rounds the input of a linear layer, by layout."""

KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.int16: 4}
"""KvType of csrc/cpu/ops.h, by dtype of the KV cache."""
_BF16_PRODUCTS = 3

MAX_INT_HEAD_DIM = 512
"""Of a quantised KV cache."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer's weight in the layout of the implementation that will run it.

    data: native_bf16: bf16[ceil(n / 32), k, 16, 2], pair j holds columns j and j + 16; native_f32: float32[ceil(n / 32), k, 32];
        native_bf16_pairs: bf16[ceil(n / 32), ceil(k / 32) * 16, 32, 2], pairs of elements of a row; activations are rounded to bfloat16.
        torch: [n, k] as given (float32 on CPU). Columns and elements beyond n and k are 0. The native_int layouts: uint8,
        `quantized_packing`; torch_int8, torch_int8_rotated, torch_int8_fast, torch_int16: float32[n, k], the weights, rotated where
        activations are; these are rounded as ROUNDINGS says; torch_bf16: the same, to bfloat16. torch_fp8, torch_int4: of a GPU, see
        `torch_quantized`.
    bias: the native layouts: float32, n rounded up to 32 elements; the others: [n]. column_scales: the native_int layouts: float32,
        n rounded up to 32 elements, a factor of each column.
    """

    n: int
    k: int
    layout: Layout
    data: torch.Tensor
    bias: torch.Tensor | None
    column_scales: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, its scales and the bias."""
        tensors = (self.data, self.bias, self.column_scales)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


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


def pack_native_pairs(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Pack a CPU weight [n, k] for the native kernel that rounds its input to bfloat16; the weight is rounded to it, too."""
    n, k = weight.shape
    more_rows, more = -n % PACKED_COLUMNS, -k % KERNEL_GROUP
    padded = torch.nn.functional.pad(weight.to(torch.bfloat16), (0, more, 0, more_rows))
    data = padded.reshape(-1, PACKED_COLUMNS, (k + more) // 2, 2).permute(0, 2, 1, 3).contiguous()
    if bias is not None:
        bias = torch.nn.functional.pad(bias.to(torch.float32), (0, more_rows)).contiguous()
    return PackedLinear(n, k, "native_bf16_pairs", data, bias)


def pack_torch(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Keep the weight as it is; on CPU as float32, where the activations are float32."""
    n, k = weight.shape
    if weight.device.type == "cpu":
        weight = weight.to(torch.float32)
        bias = None if bias is None else bias.to(torch.float32)
    return PackedLinear(n, k, "torch", weight.contiguous(), bias)


def kv_type(cache: torch.Tensor, rounded: bool) -> int:
    """KvType of attention over a K or V cache. rounded: see `ops.paged_attention`; ValueError unless the cache is bfloat16."""
    if not rounded:
        return KV_TYPES[cache.dtype]
    if cache.dtype != torch.bfloat16:
        raise ValueError(f"attention: products of bfloat16 take a bfloat16 KV cache, not {cache.dtype}")
    return _BF16_PRODUCTS


def kv_cache_shapes(
    num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V cache of one layer.

    float32: K [num_pages, num_kv_heads, head_dim, 16], V [num_pages, num_kv_heads, 16, head_dim]. bfloat16: K [num_pages, num_kv_heads,
    head_dim / 2, 16, 2], two elements of a token side by side, V [num_pages, num_kv_heads, 8, head_dim, 2], those of two tokens.
    int8: both [num_pages, num_kv_heads, head_dim + 4, 16], the bytes and behind them 16 float32 scales; int16: the same with head_dim + 2;
    see `int_parts`. The owner fills both with zeros before first use.
    ValueError for another dtype or a head_dim that is not a multiple of 16, or beyond 512 for integers.
    """
    if head_dim <= 0 or head_dim % 16:
        raise ValueError(f"head_dim must be a multiple of 16, got {head_dim}")
    if dtype in (torch.int8, torch.int16):
        if head_dim > MAX_INT_HEAD_DIM:
            raise ValueError(f"a quantised KV cache takes head_dim up to {MAX_INT_HEAD_DIM}, got {head_dim}")
        return ((num_pages, num_kv_heads, head_dim + 4 // dtype.itemsize, PAGE_SIZE),) * 2
    if dtype == torch.bfloat16:
        page = num_pages, num_kv_heads
        return (*page, head_dim // 2, PAGE_SIZE, 2), (*page, PAGE_SIZE // 2, head_dim, 2)
    if dtype == torch.float32:
        return (num_pages, num_kv_heads, head_dim, PAGE_SIZE), (num_pages, num_kv_heads, PAGE_SIZE, head_dim)
    raise ValueError(f"the KV cache is bfloat16, float32, int16 or int8, got {dtype}")


def rotation_size(head_dim: int) -> int:
    """How many elements `rotate_heads` mixes: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def rotate_heads(x: torch.Tensor) -> torch.Tensor:
    """x float32[..., head_dim] in blocks of `rotation_size` elements, each times a matrix of 1 and -1: a Walsh-Hadamard transform.

    An int8 cache keeps keys in this form (S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024): the few large
    channels of keys are spread over all, so that one scale serves them. Twice is times the size, and so is the product of a rotated
    query with a rotated key. The sums are taken in the order of csrc/cpu/rotation.h: the bits are the same.
    """
    return walsh_hadamard(x, rotation_size(x.shape[-1]))


@dataclass(frozen=True, slots=True)
class IntParts:
    """Views into a pair of int8 or int16 caches, token o of a page at [..., o, ...]. width: 4 or 2 elements, which fill 32 bits.

    k: [num_pages, num_kv_heads, head_dim / width, 16, width], int16, or uint8: 128 more than the rounded element of what `rotate_heads`
    gives. v: int8 or int16[num_pages, num_kv_heads, 16 / width, head_dim, width], token o at [o // width, :, o % width].
    k_scales, v_scales: float32[num_pages, num_kv_heads, 16].
    """

    width: int
    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor


def int_parts(k_cache: torch.Tensor, v_cache: torch.Tensor) -> IntParts:
    """What lies where in a pair of int8 or int16 caches."""
    pages, heads, rows, _ = k_cache.shape
    width = 4 // k_cache.itemsize
    head_dim = rows - width
    keys, values = k_cache[:, :, :head_dim], v_cache[:, :, :head_dim]
    return IntParts(
        width,
        (keys.view(torch.uint8) if width == 4 else keys).view(pages, heads, head_dim // width, PAGE_SIZE, width),
        values.view(pages, heads, PAGE_SIZE // width, head_dim, width),
        k_cache.view(torch.float32)[:, :, head_dim:].view(pages, heads, PAGE_SIZE),
        v_cache.view(torch.float32)[:, :, head_dim:].view(pages, heads, PAGE_SIZE),
    )


def kv_cache_geometry(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, int, int]:
    """(num_pages, num_kv_heads, head_dim) of a pair of caches; ValueError unless they are laid out as `kv_cache_shapes` says."""
    is_paired = v_cache.dtype == torch.bfloat16
    if v_cache.dim() == 4 + is_paired and k_cache.dtype == v_cache.dtype and k_cache.dtype in KV_TYPES:
        num_pages, num_kv_heads, rows, size = v_cache.shape[:4]
        head_dim = size if v_cache.dtype.is_floating_point else rows - 4 // v_cache.itemsize
        if (
            head_dim > 0
            and head_dim % 16 == 0
            and (tuple(k_cache.shape), tuple(v_cache.shape))
            == kv_cache_shapes(num_pages, num_kv_heads, head_dim, k_cache.dtype)
            and k_cache.is_contiguous()
            and v_cache.is_contiguous()
        ):
            return num_pages, num_kv_heads, head_dim
    raise ValueError(
        f"{op}: caches must be contiguous, bfloat16, float32, int16 or int8, laid out by kv_cache_shapes, "
        f"got K {k_cache.dtype} {tuple(k_cache.shape)}, V {v_cache.dtype} {tuple(v_cache.shape)}"
    )
