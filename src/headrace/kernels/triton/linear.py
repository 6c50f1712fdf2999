"""Linear layers in Triton where the vendor's library has none or a slow one: one row, 4-bit weights, and rounding to fp8.

Owns the choice by layout and number of rows, and the products of several rows with 4-bit weights. Does not own products of one row
(`one_row`) nor what torch computes (`torch_fallback`): floats of several rows, fp8 of several rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.kernels import torch_fallback
from headrace.kernels.packing import PackedLinear
from headrace.kernels.torch_quantized import FP8, FP8_MAX, SMALLEST_SCALE, scaled_product
from headrace.kernels.triton.one_row import SHAPES, one_row_linear

_MOST_INT4_ROWS = 128
"""With more rows, 4-bit weights are unpacked first: every tile of rows would unpack them again."""


@triton.jit
def _unpacked(words, scales, offsets, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    codes = ((words >> (4 * PLACE)) & 15).to(tl.float32)
    return (codes * scales + offsets).to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def _int4_rows_kernel(
    x_ptr,
    words_ptr,
    pairs_ptr,
    bias_ptr,
    y_ptr,
    rows,
    n,
    num_words,
    x_stride,
    y_stride,
    GROUP_WORDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[rows, n] = x[rows, k] @ weight^T, the weight in the layout torch_int4, unpacked to the dtype of x in tiles.

    Computed as weight @ x^T: the weight is then the operand that a product takes from registers, where it is unpacked.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inner = tl.arange(0, INNER)
    in_n, in_m = (columns < n)[:, None], (m < rows)[None, :]
    wide = columns.to(tl.int64)[:, None]
    places = words_ptr + wide * num_words + inner[None, :]
    pair_places = pairs_ptr + wide * (num_words // GROUP_WORDS)
    x_places = x_ptr + m[None, :] * x_stride + (inner // 4 * 32 + inner % 4)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for begin in range(0, num_words, INNER):
        in_k = inner < num_words - begin
        inside = in_n & in_k[None, :]
        words = tl.load(places + begin, mask=inside, other=0)
        pairs = tl.load(pair_places + ((begin + inner) // GROUP_WORDS)[None, :], mask=inside, other=0)
        scales = (pairs << 16).to(tl.float32, bitcast=True)
        offsets = (pairs & -65536).to(tl.float32, bitcast=True)
        for place in tl.static_range(8):
            x = tl.load(x_places + begin * 8 + place * 4, mask=in_k[:, None] & in_m, other=0.0)
            acc = tl.dot(_unpacked(words, scales, offsets, place, x.dtype), x, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[:, None]
    targets = y_ptr + m[None, :] * y_stride + columns[:, None]
    if ACCUMULATE:
        acc += tl.load(targets, mask=in_m & in_n, other=0.0).to(tl.float32)
    tl.store(targets, acc.to(y_ptr.dtype.element_ty), mask=in_m & in_n)


@triton.jit
def _unpack_int4_kernel(words_ptr, scales_ptr, out_ptr, num_words, GROUP_WORDS: tl.constexpr, WORDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = word < num_words
    words = tl.load(words_ptr + row * num_words + word, mask=inside, other=0)
    pairs = scales_ptr + (row * (num_words // GROUP_WORDS) + word // GROUP_WORDS) * 2
    scales = tl.load(pairs, mask=inside, other=0.0).to(tl.float32)
    offsets = tl.load(pairs + 1, mask=inside, other=0.0).to(tl.float32)
    targets = out_ptr + row * num_words * 8 + word // 4 * 32 + word % 4
    for place in tl.static_range(8):
        values = _unpacked(words, scales, offsets, place, out_ptr.dtype.element_ty)
        tl.store(targets + place * 4, values, mask=inside)


@triton.jit
def _round_rows_kernel(
    x_ptr, values_ptr, scales_ptr, size, x_stride, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
):
    """A row as fp8 values and a scale."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < size, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / LIMIT, SMALLEST)
    tl.store(scales_ptr + row, scale)
    tl.store(values_ptr + row * size + columns, (x / scale).to(values_ptr.dtype.element_ty), mask=columns < size)


def linear(x: torch.Tensor, packed: PackedLinear, out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
    """See `headrace.kernels.ops.linear`."""
    layout, rows = packed.layout, len(x)
    if not rows or layout not in SHAPES or x.shape != (rows, packed.k) or x.stride(1) != 1:
        return torch_fallback.linear(x, packed, out, accumulate)
    if accumulate and out is None:
        raise ValueError("linear: accumulate needs out")
    if out is not None and tuple(out.shape) != (rows, packed.n):
        raise ValueError(f"linear: out must be {(rows, packed.n)}, got {tuple(out.shape)}")
    if rows == 1 and (layout != "torch" or packed.data.dtype == x.dtype):
        return _into(one_row_linear, x, packed, out, accumulate)
    if layout == "torch_int4":
        if rows <= _MOST_INT4_ROWS:
            return _into(int4_rows, x, packed, out, accumulate)
        packed = PackedLinear(packed.n, packed.k, "torch", unpack_int4(packed, x.dtype), packed.bias)
    elif layout == "torch_fp8" and packed.column_scales is not None and packed.column_scales.numel() > 1:
        y = scaled_product(*fp8_values(x), packed).to(x.dtype)
        if packed.bias is not None:
            y += packed.bias.to(y.dtype)
        return y if out is None else out.add_(y) if accumulate else out.copy_(y)
    return torch_fallback.linear(x, packed, out, accumulate)


def _into(
    product: Callable[[torch.Tensor, PackedLinear, torch.Tensor, bool], None],
    x: torch.Tensor,
    packed: PackedLinear,
    out: torch.Tensor | None,
    accumulate: bool,
) -> torch.Tensor:
    out = torch.empty(len(x), packed.n, dtype=x.dtype, device=x.device) if out is None else out
    product(x, packed, out, accumulate)
    return out


def fp8_values(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, k] rounded to fp8 with a scale a row: (values [rows, k], scales float32[rows, 1])."""
    rows, k = x.shape
    values = torch.empty(rows, k, dtype=FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    _round_rows_kernel[(rows,)](
        x,
        values,
        scales,
        k,
        x.stride(0),
        LIMIT=FP8_MAX,
        SMALLEST=SMALLEST_SCALE,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8,
    )
    return values, scales


@dataclass(frozen=True, slots=True)
class Shape:
    """columns: outputs of a program. inner: words in a round. stages: rounds whose loads are in flight."""

    columns: int
    inner: int
    num_warps: int
    stages: int


INT4_ROWS = Shape(columns=64, inner=16, num_warps=4, stages=4)


def int4_rows(
    x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, accumulate: bool, shape: Shape = INT4_ROWS
) -> None:
    """x [rows, k] @ weight^T (+ bias) into out [rows, n], for the layout torch_int4."""
    assert packed.column_scales is not None, packed.layout
    rows, num_words = x.shape[0], packed.data.shape[1]
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    _int4_rows_kernel[(triton.cdiv(packed.n, shape.columns), triton.cdiv(rows, block_m))](
        x,
        packed.data,
        packed.column_scales.view(torch.int32),
        packed.data if packed.bias is None else packed.bias,
        out,
        rows,
        packed.n,
        num_words,
        x.stride(0),
        out.stride(0),
        GROUP_WORDS=num_words // packed.column_scales.shape[1],
        HAS_BIAS=packed.bias is not None,
        ACCUMULATE=accumulate,
        BLOCK_M=block_m,
        BLOCK_N=shape.columns,
        INNER=shape.inner,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps,
        num_stages=shape.stages,
    )


def unpack_int4(packed: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
    """The weights [n, k] of the layout torch_int4."""
    assert packed.column_scales is not None, packed.layout
    num_words = packed.data.shape[1]
    out = torch.empty(packed.n, packed.k, dtype=dtype, device=packed.data.device)
    words = min(512, triton.next_power_of_2(num_words))
    _unpack_int4_kernel[(packed.n, triton.cdiv(num_words, words))](
        packed.data,
        packed.column_scales,
        out,
        num_words,
        GROUP_WORDS=num_words // packed.column_scales.shape[1],
        WORDS=words,
        num_warps=4,
    )
    return out
