"""Linear layers in Triton where the vendor's library has none or a slow one: one row, 4-bit weights, and rounding to fp8; and batch-invariant ones.

Owns the choice by layout and number of rows, the products of several rows with 4-bit weights, and `invariant_linear`: the vendor's library is
faster, but picks its tiles and splits by the number of rows, and with them the order of a sum; this one always computes in one shape, for when bits
must not depend on the batch. Does not own products of one row (`one_row`) nor what torch computes (`torch_fallback`): floats of several rows, fp8 of
several rows. Source: Triton's tutorial "Matrix Multiplication".
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels import torch_fallback
from headrace.kernels.packing import PackedLinear
from headrace.kernels.torch_quantized import FP8, FP8_MAX, SMALLEST_SCALE, scaled_product
from headrace.kernels.triton.launch import Tile, is_hopper, precision
from headrace.kernels.triton.one_row import SHAPES, Shape, one_row_linear

_MOST_INT4_ROWS = 128
"""With more rows, 4-bit weights are unpacked first: every tile of rows would unpack them again."""

INT4_ROWS = Shape(columns=64, inner=16, num_warps=4, stages=4)

_INVARIANT = Tile(64, 64, 64, 4, 4)
_INVARIANT_LINEAR = ((64, Tile(64, 32, 128, 4, 4)), (256, Tile(64, 128, 64, 4, 4)))
_INVARIANT_LINEAR_MANY = Tile(128, 128, 64, 8, 3)
_INVARIANT_LINEAR_HOPPER = Tile(256, 128, 64, 8, 3)
_PANEL = 8
"""_INVARIANT_LINEAR: by most rows. In all of these an element is one chain of products of 16 elements of k, in order, whatever the tile:
its bits are the same. _PANEL: tiles of rows whose programs run side by side, so that they share columns of the weight in the cache."""


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


@triton.jit
def _first_of_tile(rows, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PANEL: tl.constexpr):
    """(row, column) where a program's tile begins, in the order of panels: PANEL tiles of rows for one tile of columns, then for the next."""
    num_m = tl.cdiv(rows, BLOCK_M)
    num_n = tl.cdiv(n, BLOCK_N)
    panel = tl.program_id(0) // (PANEL * num_n)
    in_panel = tl.program_id(0) % (PANEL * num_n)
    height = tl.minimum(num_m - panel * PANEL, PANEL)
    return (panel * PANEL + in_panel % height) * BLOCK_M, in_panel // height * BLOCK_N


@triton.jit
def _store_tile(acc, bias_ptr, y_ptr, m, columns, rows, n, y_stride, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    places = y_ptr + m[:, None] * y_stride + columns[None, :]
    inside = (m < rows)[:, None] & (columns < n)[None, :]
    if ACCUMULATE:
        acc += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rows,
    n,
    k,
    x_stride,
    y_stride,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PANEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first_m, first_n = _first_of_tile(rows, n, BLOCK_M, BLOCK_N, PANEL)
    m = (first_m + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = first_n + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_places = x_ptr + m[:, None] * x_stride + inner[None, :]
    w_places = weight_ptr + columns[None, :].to(tl.int64) * k + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_places + begin, mask=(m < rows)[:, None], other=0.0)
            w = tl.load(w_places + begin, mask=(columns < n)[None, :], other=0.0)
        else:
            left = inner < k - begin
            x = tl.load(x_places + begin, mask=(m < rows)[:, None] & left[None, :], other=0.0)
            w = tl.load(w_places + begin, mask=(columns < n)[None, :] & left[:, None], other=0.0)
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision=PRECISION)
    _store_tile(acc, bias_ptr, y_ptr, m, columns, rows, n, y_stride, HAS_BIAS, ACCUMULATE)


@triton.jit(do_not_specialize=["rows"])
def _described_linear_kernel(
    x, weight, bias_ptr, y_ptr, rows, n, k, y_stride,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """`_linear_kernel` with tiles that Hopper's copy engine brings: the same products in the same order, with the same bits."""
    first_m, first_n = _first_of_tile(rows, n, BLOCK_M, BLOCK_N, PANEL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, k, BLOCK_K):
        acc = tl.dot(x.load([first_m, begin]), weight.load([first_n, begin]).T, acc)
    m = (first_m + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = first_n + tl.arange(0, BLOCK_N)
    _store_tile(acc, bias_ptr, y_ptr, m, columns, rows, n, y_stride, HAS_BIAS, ACCUMULATE)


def linear(x: torch.Tensor, packed: PackedLinear, out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
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
        PRECISION=precision(x),
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


def invariant_linear(
    x: torch.Tensor, packed: PackedLinear, out: torch.Tensor | None, accumulate: bool, tile: Tile | None = None
) -> torch.Tensor:
    """The bits of a row depend on that row alone. Quantised weights are left to torch."""
    if packed.layout != "torch" or x.dim() != 2 or x.shape[1] != packed.k or x.stride(1) != 1:
        return torch_fallback.linear(x, packed, out, accumulate)
    if accumulate and out is None:
        raise ValueError("linear: accumulate needs out")
    rows = x.shape[0]
    if out is None:
        out = torch.empty(rows, packed.n, dtype=x.dtype, device=x.device)
    elif tuple(out.shape) != (rows, packed.n):
        raise ValueError(f"linear: out must be {(rows, packed.n)}, got {tuple(out.shape)}")
    if not rows:
        return out
    described = tile is None and rows > _INVARIANT_LINEAR[-1][0] and is_hopper(x) and _has_descriptors(x, packed)
    if described:
        described_linear(x, packed, out, accumulate)
    else:
        tile = tile or _invariant_tile(x)
        _linear_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(packed.n, tile.columns),)](
            x,
            packed.data,
            packed.data if packed.bias is None else packed.bias,
            out,
            rows,
            packed.n,
            packed.k,
            x.stride(0),
            out.stride(0),
            HAS_BIAS=packed.bias is not None,
            ACCUMULATE=accumulate,
            EVEN_K=packed.k % tile.inner == 0,
            PANEL=_PANEL,
            PRECISION=precision(x),
            **tile.options,
        )
    return out


def _has_descriptors(x: torch.Tensor, packed: PackedLinear) -> bool:
    """Whether the copy engine takes both: rows that begin at multiples of 16 bytes."""
    return (
        x.dtype == packed.data.dtype
        and x.element_size() == 2
        and x.stride(0) % 8 == packed.k % 8 == x.data_ptr() % 16 == 0
    )


def described_linear(
    x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, accumulate: bool, tile: Tile = _INVARIANT_LINEAR_HOPPER
) -> None:
    """`invariant_linear` of many rows on Hopper."""
    rows, n, k = len(x), packed.n, packed.k
    _described_linear_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns),)](
        TensorDescriptor(x, [rows, k], [x.stride(0), 1], [tile.rows, tile.inner]),
        TensorDescriptor(packed.data, [n, k], [k, 1], [tile.columns, tile.inner]),
        packed.data if packed.bias is None else packed.bias,
        out,
        rows,
        n,
        k,
        out.stride(0),
        HAS_BIAS=packed.bias is not None,
        ACCUMULATE=accumulate,
        PANEL=_PANEL,
        **tile.options,
    )


def _invariant_tile(x: torch.Tensor) -> Tile:
    if x.element_size() > 2:
        return _INVARIANT
    return next((tile for most, tile in _INVARIANT_LINEAR if len(x) <= most), _INVARIANT_LINEAR_MANY)
