"""Linear layers of one row, in Triton: a step that decodes one sequence reads each weight once and does little else.

Owns the products of one row with weights in 16 bits, in fp8 and in 4 bits. Weights are widened in registers and multiplied by activations as they
are, which are not rounded. Does not own the layouts (`kernels.torch_quantized`) nor products of more rows (`int4_rows`, the vendor's library).

A program computes a few outputs over all of k. Each lane adds up its own elements of k in float32, in order; the lanes are summed once, at the end.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.kernels.packing import PackedLinear
from headrace.kernels.triton.launch import overlapping, wait_for_previous


@dataclass(frozen=True, slots=True)
class Shape:
    """columns: outputs of a program. inner: elements of k in a round (of 4 bits: units of 32). stages: rounds whose loads are in flight."""

    columns: int
    inner: int
    num_warps: int
    stages: int


SHAPES = {
    "torch": Shape(columns=8, inner=512, num_warps=4, stages=4),
    "torch_fp8": Shape(columns=8, inner=512, num_warps=4, stages=4),
    "torch_int4": Shape(columns=8, inner=32, num_warps=1, stages=3),
}
_WIDE_SHAPES = {
    "torch": Shape(columns=4, inner=512, num_warps=4, stages=4),
    "torch_fp8": Shape(columns=8, inner=512, num_warps=4, stages=6),
    "torch_int4": Shape(columns=8, inner=32, num_warps=1, stages=2),
}
"""By layout; those of wide layers, whose programs are many on each processor in any case."""

_WIDE = 16384

_BITS_OF_ONE = 0x3F800000


@triton.jit
def _floats_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    n,
    k,
    HAS_SCALES: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """y[n] = weight[n, k] @ x[k], times a scale a column. EVEN: k is a multiple of INNER and n one of COLUMNS."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    places = weight_ptr + columns.to(tl.int64)[:, None] * k + inner[None, :]
    acc = tl.zeros((COLUMNS, INNER), tl.float32)
    first = 0
    if EVEN and OVERLAPS:
        # Weights do not depend on the kernel before: the first are asked for while it still runs.
        w = tl.load(places)
        wait_for_previous(OVERLAPS)
        acc += w.to(tl.float32) * tl.load(x_ptr + inner).to(tl.float32)[None, :]
        first = INNER
    else:
        wait_for_previous(OVERLAPS)
    for begin in tl.range(first, k, INNER, num_stages=STAGES):
        if EVEN:
            w = tl.load(places + begin)
            x = tl.load(x_ptr + begin + inner)
        else:
            left = inner < k - begin
            w = tl.load(places + begin, mask=(columns < n)[:, None] & left[None, :], other=0.0)
            x = tl.load(x_ptr + begin + inner, mask=left, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    _store(tl.sum(acc, 1), scales_ptr, bias_ptr, y_ptr, columns, n, HAS_SCALES, SCALE_STEP, HAS_BIAS, ACCUMULATE)


@triton.jit(do_not_specialize=["one"])
def _int4_kernel(
    x_ptr,
    words_ptr,
    pairs_ptr,
    bias_ptr,
    y_ptr,
    n,
    num_units,
    one,
    GROUP_UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """As `_floats_kernel` of a weight in the layout torch_int4, unit by unit: four words, 32 codes.

    pairs: the scale of a group in the low half of an int32, its offset in the high one. A code c in the mantissa of 1.0 is a float 1 + c / f, with f
    2048 or 128 by the place of its bits; so c x = f (1 + c / f) x - f x, and no code has to be converted. one: the bits of 1.0, in a register,
    since an instruction takes one immediate and the mask is one.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    unit = tl.arange(0, INNER)
    word = tl.arange(0, 4)
    # Of one shape, [columns, units, words], so that every tensor lies in the same lanes.
    rows = columns.to(tl.int64)[:, None, None]
    places = words_ptr + rows * (num_units * 4) + (unit * 4)[None, :, None] + word[None, None, :]
    x_places = x_ptr + (unit * 32)[None, :, None] + word[None, None, :]
    pair_places = (
        pairs_ptr + columns.to(tl.int64)[:, None] * (num_units // GROUP_UNITS) + (unit // GROUP_UNITS)[None, :]
    )
    acc = tl.zeros((COLUMNS, INNER), tl.float32)
    wait_for_previous(OVERLAPS)
    for begin in tl.range(0, num_units, INNER, num_stages=STAGES):
        if EVEN:
            words = tl.load(places + begin * 4)
            pairs = tl.load(pair_places + begin // GROUP_UNITS)
        else:
            left = unit < num_units - begin
            in_k = left[None, :, None]
            words = tl.load(places + begin * 4, mask=(columns < n)[:, None, None] & in_k, other=0)
            pairs = tl.load(pair_places + begin // GROUP_UNITS, mask=(columns < n)[:, None] & left[None, :], other=0)
        sums = tl.zeros((COLUMNS, INNER, 4), tl.float32)
        scaled = tl.zeros((1, INNER, 4), tl.float32)
        total = tl.zeros((1, INNER, 4), tl.float32)
        for place in tl.static_range(8):
            if EVEN:
                x = tl.load(x_places + begin * 32 + place * 4).to(tl.float32)
            else:
                x = tl.load(x_places + begin * 32 + place * 4, mask=in_k, other=0.0).to(tl.float32)
            total += x
            if place < 2:
                bits = words << 12
            elif place < 4:
                bits = words << 4
            elif place < 6:
                bits = words >> 4
            else:
                bits = words >> 12
            if place % 2 == 0:
                bits = bits & (15 << 12)
                x = x * 2048.0
            else:
                bits = bits & (15 << 16)
                x = x * 128.0
            scaled += x
            sums += (bits | one).to(tl.float32, bitcast=True) * x
        scales = (pairs << 16).to(tl.float32, bitcast=True)
        offsets = (pairs & -65536).to(tl.float32, bitcast=True)
        acc += tl.sum(sums - scaled, 2) * scales + tl.sum(total, 2) * offsets
    _store(tl.sum(acc, 1), bias_ptr, bias_ptr, y_ptr, columns, n, False, 0, HAS_BIAS, ACCUMULATE)


@triton.jit
def _store(
    y,
    scales_ptr,
    bias_ptr,
    y_ptr,
    columns,
    n,
    HAS_SCALES: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    inside = columns < n
    if HAS_SCALES:
        y = y * tl.load(scales_ptr + columns * SCALE_STEP, mask=inside, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if ACCUMULATE:
        y += tl.load(y_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


def one_row_linear(
    x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, accumulate: bool, shape: Shape | None = None
) -> None:
    """x [1, k] @ weight^T (+ bias) into out [1, n], for the layouts of SHAPES. shape: instead of the layout's own."""
    shape = shape or (_WIDE_SHAPES if packed.n >= _WIDE else SHAPES)[packed.layout]
    n, k, scales = packed.n, packed.k, packed.column_scales
    rounds = k // 32 if packed.layout == "torch_int4" else k
    bias = packed.data if packed.bias is None else packed.bias
    grid = (triton.cdiv(n, shape.columns),)
    options = {
        "HAS_BIAS": packed.bias is not None,
        "ACCUMULATE": accumulate,
        "EVEN": rounds % shape.inner == 0 and n % shape.columns == 0,
        "COLUMNS": shape.columns,
        "INNER": shape.inner,
        "STAGES": shape.stages,
        "num_warps": shape.num_warps,
        **overlapping(x),
    }
    if packed.layout == "torch_int4":
        assert scales is not None, packed.layout
        pairs, group = scales.view(torch.int32), rounds // scales.shape[1]
        _int4_kernel[grid](x, packed.data, pairs, bias, out, n, rounds, _BITS_OF_ONE, GROUP_UNITS=group, **options)
        return
    _floats_kernel[grid](
        x,
        packed.data,
        packed.data if scales is None else scales,
        bias,
        out,
        n,
        k,
        HAS_SCALES=scales is not None,
        SCALE_STEP=0 if scales is None or scales.numel() == 1 else 1,
        **options,
    )
