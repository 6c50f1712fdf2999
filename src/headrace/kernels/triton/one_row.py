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
    "torch": ((16384, Shape(columns=4, inner=512, num_warps=4, stages=4)), (0, Shape(8, 512, 4, 4))),
    "torch_fp8": ((16384, Shape(columns=8, inner=512, num_warps=4, stages=6)), (0, Shape(8, 512, 4, 4))),
    "torch_int4": (
        (16384, Shape(columns=8, inner=128, num_warps=4, stages=2)),
        (4097, Shape(columns=8, inner=64, num_warps=2, stages=1)),
        (0, Shape(columns=4, inner=64, num_warps=2, stages=2)),
    ),
}
"""By layout, for layers of at least so many outputs. Measured on an H100 in a chain of layers (docs/gpu.md): the more programs a processor has in any
case, the more each may do, and the fewer hold two rounds of words."""

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


@triton.jit
def _load_units(
    places,
    pair_places,
    in_n,
    begin,
    num_units,
    GROUP_UNITS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Words [columns, 4 * INNER] and pairs [columns, INNER] of the units from `begin` on, in the lanes that multiply them."""
    if EVEN:
        words = tl.load(places + begin * 4)
        pairs = tl.load(pair_places + begin // GROUP_UNITS)
    else:
        left = num_units - begin
        in_words = (tl.arange(0, INNER * 4) < left * 4)[None, :]
        words = tl.load(places + begin * 4, mask=in_n[:, None] & in_words, other=0)
        in_units = (tl.arange(0, INNER) < left)[:, None]
        pairs = tl.load(pair_places + begin // GROUP_UNITS, mask=in_n[None, :] & in_units, other=0)
    return words, tl.trans(pairs)


@triton.jit
def _int4_round(
    words,
    pairs,
    x_places,
    begin,
    num_units,
    one,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Products of the units from `begin` on: float32[COLUMNS, INNER].

    A code c in the mantissa of 1.0 is a float 1 + c / f, with f 4096, 256 or 16 by the place of its bits; so c x = f (1 + c / f) x - f x, and no code
    has to be converted. Three shifts bring all eight codes of a word to one of these places.
    """
    sums = tl.zeros((COLUMNS, INNER * 4), tl.float32)
    low = tl.zeros((1, INNER * 4), tl.float32)
    middle = tl.zeros((1, INNER * 4), tl.float32)
    high = tl.zeros((1, INNER * 4), tl.float32)
    for place in tl.static_range(8):
        if EVEN:
            x = tl.load(x_places + begin * 32 + place * 4).to(tl.float32)
        else:
            in_k = (tl.arange(0, INNER * 4) < (num_units - begin) * 4)[None, :]
            x = tl.load(x_places + begin * 32 + place * 4, mask=in_k, other=0.0).to(tl.float32)
        if place < 3:
            bits = words << 11
        elif place < 6:
            bits = words >> 1
        else:
            bits = words >> 9
        if place == 0 or place == 3:
            bits = bits & (15 << 11)
            low += x
            x = x * 4096.0
        elif place == 1 or place == 4 or place == 6:
            bits = bits & (15 << 15)
            middle += x
            x = x * 256.0
        else:
            bits = bits & (15 << 19)
            high += x
            x = x * 16.0
        sums += (bits | one).to(tl.float32, bitcast=True) * x
    low = tl.sum(tl.reshape(low, (1, INNER, 4)), 2)
    middle = tl.sum(tl.reshape(middle, (1, INNER, 4)), 2)
    high = tl.sum(tl.reshape(high, (1, INNER, 4)), 2)
    codes = tl.sum(tl.reshape(sums, (COLUMNS, INNER, 4)), 2) - (4096.0 * low + 256.0 * middle + 16.0 * high)
    scales = (pairs << 16).to(tl.float32, bitcast=True)
    offsets = (pairs & -65536).to(tl.float32, bitcast=True)
    return codes * scales + (low + middle + high) * offsets


@triton.jit(do_not_specialize=["one", "step"])
def _int4_kernel(
    x_ptr,
    words_ptr,
    pairs_ptr,
    bias_ptr,
    y_ptr,
    n,
    num_units,
    one,
    step,
    GROUP_UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """As `_floats_kernel` of a weight in the layout torch_int4, unit by unit: four words, 32 codes. STAGES: 1, or 2: words of the next round are on
    their way to registers while those of this one are multiplied.

    pairs: the scale of a group in the low half of an int32, its offset in the high one. one: the bits of 1.0, in a register, since an instruction
    takes one immediate and a mask is one. step: 1, unknown to the compiler, and units first: so it loads a pair into the lane that needs it.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_n = columns < n
    wide = columns.to(tl.int64)
    word = tl.arange(0, INNER * 4)
    places = words_ptr + wide[:, None] * (num_units * 4) + word[None, :]
    pair = tl.arange(0, INNER) * step // GROUP_UNITS
    pair_places = pairs_ptr + wide[None, :] * (num_units // GROUP_UNITS) + pair[:, None]
    x_places = x_ptr + (word // 4 * 32 + word % 4)[None, :]
    acc = tl.zeros((COLUMNS, INNER), tl.float32)
    words, pairs = _load_units(places, pair_places, in_n, 0, num_units, GROUP_UNITS, INNER, EVEN)
    wait_for_previous(OVERLAPS)
    if STAGES > 1:
        for begin in tl.range(INNER, num_units, INNER, num_stages=1):
            following = _load_units(places, pair_places, in_n, begin, num_units, GROUP_UNITS, INNER, EVEN)
            acc += _int4_round(words, pairs, x_places, begin - INNER, num_units, one, COLUMNS, INNER, EVEN)
            words, pairs = following
        last = (num_units - 1) // INNER * INNER
        acc += _int4_round(words, pairs, x_places, last, num_units, one, COLUMNS, INNER, EVEN)
    else:
        acc += _int4_round(words, pairs, x_places, 0, num_units, one, COLUMNS, INNER, EVEN)
        for begin in tl.range(INNER, num_units, INNER, num_stages=1):
            words, pairs = _load_units(places, pair_places, in_n, begin, num_units, GROUP_UNITS, INNER, EVEN)
            acc += _int4_round(words, pairs, x_places, begin, num_units, one, COLUMNS, INNER, EVEN)
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


def _shape_of(packed: PackedLinear) -> Shape:
    return next(shape for least, shape in SHAPES[packed.layout] if packed.n >= least)


def one_row_linear(
    x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, accumulate: bool, shape: Shape | None = None
) -> None:
    """x [1, k] @ weight^T (+ bias) into out [1, n], for the layouts of SHAPES. shape: instead of the layout's own."""
    shape = shape or _shape_of(packed)
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
        _int4_kernel[grid](x, packed.data, pairs, bias, out, n, rounds, _BITS_OF_ONE, 1, GROUP_UNITS=group, **options)
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
