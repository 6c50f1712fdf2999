"""Layouts that kernels and their callers share: packed linear weights and the pages of the KV cache.

Owns the shapes and the reordering of weights at load time. Does not own memory: the KV pool allocates its tensors from
`kv_cache_shapes`, the loader keeps what `pack` returns. Runs in whatever thread loads the model.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import FORMATS, KERNEL_GROUP, WIDE_GROUP, Rounding, Scheme, codes_of

PAGE_SIZE = 16
"""Tokens in a page of the KV cache."""

PACKED_COLUMNS = 32
"""Output columns of one block of a packed weight."""

Layout = Literal[
    "native_bf16",
    "native_f32",
    "native_int16",
    "native_int8",
    "native_int8_fast",
    "native_int4",
    "native_int4_min",
    "torch",
    "torch_int8",
    "torch_int8_fast",
    "torch_int16",
    "torch_fp8",
    "torch_int4",
]


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """Packed codes that the native kernels multiply. kernel: QuantScheme of csrc/cpu/ops.h. minimums: behind the scales there are some."""

    kernel: int
    scheme: Scheme
    minimums: bool = False


QUANTIZED_LAYOUTS: dict[Layout, QuantizedLayout] = {
    "native_int8": QuantizedLayout(0, "int8"),
    "native_int8_fast": QuantizedLayout(1, "int8-fast"),
    "native_int4": QuantizedLayout(2, "int4"),
    "native_int4_min": QuantizedLayout(3, "int4", minimums=True),
    "native_int16": QuantizedLayout(4, "int16"),
}

QUANT_SCHEMES: dict[str, int] = {layout: quantized.kernel for layout, quantized in QUANTIZED_LAYOUTS.items()}
"""QuantScheme of csrc/cpu/ops.h, by layout."""

ROUNDINGS: dict[Layout, Rounding] = {
    "torch_int8": Rounding(8, KERNEL_GROUP),
    "torch_int8_fast": Rounding(8, WIDE_GROUP),
    "torch_int16": Rounding(16, WIDE_GROUP),
}
"""How torch rounds the input of a linear layer, by layout."""

KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""KvType of csrc/cpu/ops.h, by dtype of the KV cache."""

MAX_INT8_HEAD_DIM = 512
"""Of an int8 KV cache: sums of its products fit 32 bits."""

QUANT_LIMITS = {8: 127, 16: 8191}
"""Largest magnitude of an activation as an integer, by its bits."""

MAX_QUANTIZED_K = 65536
"""Longest row of a quantised linear: sums of its products fit 32 bits."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer's weight in the layout of the implementation that will run it.

    data: native_bf16: bf16[ceil(n / 32), k, 16, 2], pair j holds columns j and j + 16; native_f32: float32[ceil(n / 32), k, 32];
        torch: [n, k] as given (float32 on CPU). Columns beyond n are 0. The native_int layouts: uint8, `pack_native_quantized`;
        torch_int8, torch_int8_fast, torch_int16: float32[n, k], the weights; activations are rounded as ROUNDINGS says. torch_fp8,
        torch_int4: of a GPU, see `torch_quantized`.
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


def pack_torch(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Keep the weight as it is; on CPU as float32, where the activations are float32."""
    n, k = weight.shape
    if weight.device.type == "cpu":
        weight = weight.to(torch.float32)
        bias = None if bias is None else bias.to(torch.float32)
    return PackedLinear(n, k, "torch", weight.contiguous(), bias)


def check_quantized(matrix: QuantizedMatrix, bias: torch.Tensor | None) -> None:
    """ValueError unless the matrix' parts fit one another and bias is [n] or None."""
    grid = codes_of(matrix.scheme)
    (n, k), size = matrix.shape, matrix.group_size
    wanted = (n, -(-k // size))
    for what, tensor in (("scales", matrix.scales), ("minimums", matrix.minimums)):
        if tensor is not None and (tuple(tensor.shape) != wanted or tensor.dtype != torch.float32):
            raise ValueError(
                f"pack_linear: {what} must be float32 {list(wanted)}, got {tensor.dtype} {list(tensor.shape)}"
            )
    if matrix.codes.dtype != getattr(torch, grid.dtype):
        raise ValueError(f"pack_linear: codes must be torch.{grid.dtype}, got {matrix.codes.dtype}")
    if matrix.minimums is not None and not grid.minimums:
        raise ValueError(f"pack_linear: {matrix.scheme} has no minimums")
    if size != k if grid.scale_per_row else size % KERNEL_GROUP and size < k:
        raise ValueError(f"pack_linear: {matrix.scheme} with groups of {size} in rows of {k}")
    if k > MAX_QUANTIZED_K:
        raise ValueError(f"pack_linear: a quantised row has at most {MAX_QUANTIZED_K} elements, got {k}")
    if grid.max_norm is not None and _largest_norm(matrix.codes) > grid.max_norm:
        raise ValueError(
            f"pack_linear: {matrix.scheme} codes of a row have a norm of at most {grid.max_norm} in each {WIDE_GROUP} elements"
        )
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"pack_linear: bias must be [{n}], got shape {tuple(bias.shape)}")


def _largest_norm(codes: torch.Tensor) -> float:
    groups = torch.nn.functional.pad(codes, (0, -codes.shape[1] % WIDE_GROUP)).unflatten(1, (-1, WIDE_GROUP))
    return max((float(part.double().square().sum(dim=2).amax()) for part in groups.split(256)), default=0.0) ** 0.5


def pack_native_quantized(matrix: QuantizedMatrix, bias: torch.Tensor | None) -> PackedLinear:
    """Pack for the native kernel; k is padded to a multiple of 32 (groups = k / 32), n to one of 32 (blocks = n / 32).

    native_int8: uint8[blocks, groups, 1088], a record of [8][32][4] codes and 32 half scales; native_int4: [.., 576], [4][32][4] bytes
    (element 8 i + j in the low, 8 i + 4 + j in the high nibble of byte j) and 32 half scales; native_int4_min: [.., 640], 32 half
    minimums more; native_int8_fast: [blocks, k / 4, 32, 4] codes; native_int16: int16[blocks, k / 2, 32, 2]. See `half_scales` for the scales.
    """
    n, k = matrix.shape
    blocks, groups = -(-n // PACKED_COLUMNS), -(-k // KERNEL_GROUP)
    more = blocks * PACKED_COLUMNS - n
    grid = codes_of(matrix.scheme)
    zero = grid.zero if matrix.minimums is None else 0
    padding = (0, groups * KERNEL_GROUP - k, 0, more)
    codes = torch.nn.functional.pad(matrix.codes, padding, value=zero) if any(padding) else matrix.codes
    padded_bias = None
    if bias is not None:
        padded_bias = torch.nn.functional.pad(bias.to(torch.float32), (0, more)).contiguous()
    layout = next(
        name
        for name, quantized in QUANTIZED_LAYOUTS.items()
        if (quantized.scheme, quantized.minimums) == (matrix.scheme, matrix.minimums is not None)
    )
    if grid.scale_per_row:
        data = codes.reshape(blocks, PACKED_COLUMNS, -1, 32 // grid.bits).permute(0, 2, 1, 3).contiguous()
        columns = torch.nn.functional.pad(matrix.scales[:, 0], (0, more)).contiguous()
        return PackedLinear(n, k, layout, data, padded_bias, columns)
    scales, minimums, columns = half_scales(matrix)
    halves = [scales] if minimums is None else [scales, minimums]
    if grid.bits == 8:
        ordered = codes.reshape(blocks, PACKED_COLUMNS, groups, 8, 4).permute(0, 2, 3, 1, 4)
    else:
        nibbles = codes.reshape(blocks, PACKED_COLUMNS, groups, 4, 2, 4)
        ordered = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).permute(0, 2, 3, 1, 4)
    record = [ordered.reshape(blocks, groups, -1)]
    for half in halves:
        padded = torch.nn.functional.pad(half, (0, 0, 0, more)).reshape(blocks, PACKED_COLUMNS, groups)
        record.append(padded.permute(0, 2, 1).contiguous().view(torch.uint8))
    columns = torch.nn.functional.pad(columns, (0, more)).contiguous()
    return PackedLinear(n, k, layout, torch.cat(record, dim=2), padded_bias, columns)


def pack_torch_quantized(matrix: QuantizedMatrix, bias: torch.Tensor | None) -> PackedLinear:
    """Keep the weights in float32, four to eight times the bytes: this is the reference, not the route to a small model."""
    n, k = matrix.shape
    weights = unpack_quantized(pack_native_quantized(matrix, None))
    bias = None if bias is None else bias.to(torch.float32)
    layout = next(name for name, rounding in ROUNDINGS.items() if rounding == FORMATS[matrix.scheme].activations)
    return PackedLinear(n, k, layout, weights, bias)


def half_scales(matrix: QuantizedMatrix) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(scales, minimums) float16[n, k / 32] and a power of two for each row, float32[n], that multiplies both.

    The power brings the largest of a row to 2^14 .. 2^15, so no scale is subnormal unless it is 2^28 times smaller than that. A scale
    that was a float16 stays exact; others round to 11 bits.
    """
    matrix = matrix.regrouped(KERNEL_GROUP) if matrix.group_size % KERNEL_GROUP == 0 else matrix
    largest = matrix.scales.abs().amax(dim=1)
    if matrix.minimums is not None:
        largest = torch.maximum(largest, matrix.minimums.abs().amax(dim=1))
    exponents = torch.frexp(largest).exponent.clamp(min=-100) - 15
    columns = torch.ldexp(torch.ones_like(largest), exponents)
    scales = torch.ldexp(matrix.scales, -exponents[:, None]).to(torch.float16)
    minimums = None if matrix.minimums is None else torch.ldexp(matrix.minimums, -exponents[:, None]).to(torch.float16)
    return scales, minimums, columns


def unpack_quantized(packed: PackedLinear) -> torch.Tensor:
    """The weights float32[n, k] of one of the native_int layouts."""
    return quantized_matrix(packed).dequantize().contiguous()


def quantized_matrix(packed: PackedLinear) -> QuantizedMatrix:
    """What was packed in one of the native_int layouts: the same codes, and scales as the kernels use them. Packing it again is exact."""
    assert packed.column_scales is not None, packed.layout
    n, k, data, columns = packed.n, packed.k, packed.data, packed.column_scales[: packed.n, None]
    quantized = QUANTIZED_LAYOUTS[packed.layout]
    grid = codes_of(quantized.scheme)
    if grid.scale_per_row:
        codes = data.permute(0, 2, 1, 3).reshape(-1, data.shape[1] * data.shape[3])[:n, :k].contiguous()
        return QuantizedMatrix(quantized.scheme, codes, columns, None, k)
    blocks, groups = data.shape[:2]
    num_code_bytes = PACKED_COLUMNS * KERNEL_GROUP * grid.bits // 8
    codes, halves = data[..., :num_code_bytes], data[..., num_code_bytes:]
    if grid.bits == 8:
        codes = codes.reshape(blocks, groups, 8, PACKED_COLUMNS, 4).permute(0, 3, 1, 2, 4)
    else:
        nibbles = codes.reshape(blocks, groups, 4, PACKED_COLUMNS, 4).permute(0, 3, 1, 2, 4)
        codes = torch.stack((nibbles & 15, nibbles >> 4), dim=4)
    codes = codes.reshape(blocks * PACKED_COLUMNS, groups * KERNEL_GROUP)[:n, :k].contiguous()
    scales = halves.contiguous().view(torch.float16).reshape(blocks, groups, -1, PACKED_COLUMNS).permute(2, 0, 3, 1)
    scales = scales.reshape(-1, blocks * PACKED_COLUMNS, groups)[:, :n].to(torch.float32) * columns
    minimums = scales[1] if quantized.minimums else None
    return QuantizedMatrix(quantized.scheme, codes, scales[0], minimums, KERNEL_GROUP)


def kv_cache_shapes(
    num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V cache of one layer. K is transposed within its page, V is not.

    bfloat16: K [num_pages, num_kv_heads, head_dim / 2, 16, 2]; float32: K [num_pages, num_kv_heads, head_dim, 16].
    V [num_pages, num_kv_heads, 16, head_dim]. int8: both [num_pages, num_kv_heads, head_dim + 4, 16], the bytes and behind them 16
    float32 scales, see `int8_parts`. The owner fills both with zeros before first use.
    ValueError for another dtype or a head_dim that is not a multiple of 16, or beyond 512 for int8.
    """
    if head_dim <= 0 or head_dim % 16:
        raise ValueError(f"head_dim must be a multiple of 16, got {head_dim}")
    if dtype == torch.int8:
        if head_dim > MAX_INT8_HEAD_DIM:
            raise ValueError(f"an int8 KV cache takes head_dim up to {MAX_INT8_HEAD_DIM}, got {head_dim}")
        return ((num_pages, num_kv_heads, head_dim + 4, PAGE_SIZE),) * 2
    v_shape = (num_pages, num_kv_heads, PAGE_SIZE, head_dim)
    if dtype == torch.bfloat16:
        return (num_pages, num_kv_heads, head_dim // 2, PAGE_SIZE, 2), v_shape
    if dtype == torch.float32:
        return (num_pages, num_kv_heads, head_dim, PAGE_SIZE), v_shape
    raise ValueError(f"the KV cache is bfloat16, float32 or int8, got {dtype}")


@dataclass(frozen=True, slots=True)
class Int8Parts:
    """Views into a pair of int8 caches, token o of a page at [..., o, ...].

    k: uint8[num_pages, num_kv_heads, head_dim / 4, 16, 4], 128 more than the rounded element.
    v: int8[num_pages, num_kv_heads, 4, head_dim, 4], token o at [o // 4, :, o % 4].
    k_scales, v_scales: float32[num_pages, num_kv_heads, 4, 4], token o at [o // 4, o % 4].
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor


def int8_parts(k_cache: torch.Tensor, v_cache: torch.Tensor) -> Int8Parts:
    """What lies where in a pair of int8 caches."""
    pages, heads, rows, _ = k_cache.shape
    head_dim = rows - 4
    k_bytes, v_bytes = k_cache[:, :, :head_dim], v_cache[:, :, :head_dim]
    return Int8Parts(
        k_bytes.view(torch.uint8).view(pages, heads, head_dim // 4, PAGE_SIZE, 4),
        v_bytes.view(pages, heads, PAGE_SIZE // 4, head_dim, 4),
        k_cache.view(torch.float32)[:, :, head_dim:],
        v_cache.view(torch.float32)[:, :, head_dim:],
    )


def kv_cache_geometry(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, int, int]:
    """(num_pages, num_kv_heads, head_dim) of a pair of caches; ValueError unless they are laid out as `kv_cache_shapes` says."""
    if v_cache.dim() == 4 and k_cache.dtype == v_cache.dtype and k_cache.dtype in KV_TYPES:
        num_pages, num_kv_heads, rows, size = v_cache.shape
        head_dim = rows - 4 if v_cache.dtype == torch.int8 else size
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
        f"{op}: caches must be contiguous, bfloat16, float32 or int8, laid out by kv_cache_shapes, "
        f"got K {k_cache.dtype} {tuple(k_cache.shape)}, V {v_cache.dtype} {tuple(v_cache.shape)}"
    )
