"""From rows of logits to ids, in Triton: argmax, the sums of logprobs, and the draw with its filters and masks. Nothing is sorted, nothing waits.

Does not own what a draw is: `kernels.drawing` defines it, and the ids here are the same, bit for bit. So float32 operations are rounded one by one
(no fused multiply-add, exact division), weights are integers, and their sums do not depend on an order.

The filters cut at a value. A cut is found by bisection over the 32 bits of a float: "fewer than k logits are above it" (top-k), "what is
above it weighs less than top_p of the total" (top-p). Of the logits equal to the cut the lower ids are kept, as many as still fit. Three
cuts are tried in each pass over the row, so 16 passes find the one, and only rows that have a filter make them.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.drawing import check_mask_rows

_NO_FUSION = {"enable_fp_fusion": False}
_PEAK_BLOCK = 4096
_DRAW_BLOCK = 2048
_DRAW_WARPS = 8

_MASK_BLOCK_WORDS = 64
_WORD = tl.constexpr(32)

_NO_ID = tl.constexpr(-1)
_BIG_ID = tl.constexpr(2147483647)
# Adding and taking away 1.5 * 2^23 rounds a small float32 to the nearest integer, halves to even.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def _mask_kernel(
    logits_ptr, row_stride, masks_ptr, mask_rows_ptr, out_ptr, out_stride, size, num_words, BLOCK_WORDS: tl.constexpr
):
    """A block of a row: -inf where its mask, if it has one, has no bit. Logits are read only where a word of it has any bit; most have none."""
    i = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[:, None]
    bits = tl.arange(0, _WORD)[None, :]
    ids = words * _WORD + bits
    inside = ids < size
    row = tl.load(mask_rows_ptr + i)
    # Without a mask every bit is set.
    mask = tl.load(masks_ptr + row * num_words + words, mask=(words < num_words) & (row >= 0), other=-1)
    x = tl.load(logits_ptr + i * row_stride + ids, mask=inside & (mask != 0), other=float("-inf"))
    allowed = ((mask >> bits) & 1) != 0
    tl.store(out_ptr + i * out_stride + ids, tl.where(allowed, x, float("-inf")), mask=inside)


@triton.jit
def _rounded(x):
    return (x + _ROUNDER) - _ROUNDER


@triton.jit
def _weights(logits, peak, temperature):
    """`drawing.weights_of` of a block: int64."""
    z = tl.div_rn(logits - peak, tl.zeros_like(logits) + temperature)
    z = tl.maximum(z, -30.0)
    n = _rounded(z * 1.44269502162933349609375)
    r = z - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = r * 1.9875691500e-4
    p = (p + 1.3981999507e-3) * r
    p = (p + 8.3334519073e-3) * r
    p = (p + 4.1665795894e-2) * r
    p = (p + 1.6666665459e-1) * r
    p = (p + 5.0000001201e-1) * (r * r)
    y = (p + r) + 1.0
    power = ((n.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)
    return (y * power).to(tl.int64)


@triton.jit
def _ordered(logits):
    """int64 in [0, 2^32) that compare as the floats do; both zeros are one."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -bits - 1, bits + 2147483648)


@triton.jit
def _load_row(row_ptr, ids, size):
    return tl.load(row_ptr + ids, mask=ids < size, other=float("-inf"))


@triton.jit
def _peak_kernel(logits_ptr, row_stride, size, part_values_ptr, part_ids_ptr, num_parts, BLOCK: tl.constexpr):
    """The largest logit of a part of a row and its lowest id; NaN and -1 when the part holds a NaN."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    x = _load_row(logits_ptr + row * row_stride, ids, size)
    peak = tl.max(tl.where(x == x, x, float("-inf")), 0)
    lowest = tl.min(tl.where((x == peak) & (ids < size), ids, _BIG_ID), 0)
    has_nan = tl.max((x != x).to(tl.int32), 0)
    place = row * num_parts + part
    tl.store(part_values_ptr + place, tl.where(has_nan != 0, float("nan"), peak))
    tl.store(part_ids_ptr + place, tl.where(has_nan != 0, _NO_ID, lowest))


@triton.jit
def _joined_peak(part_values_ptr, part_ids_ptr, row, num_parts, PARTS: tl.constexpr):
    """(largest logit, its lowest id) of a row from its parts; (NaN, -1) when one holds a NaN."""
    parts = tl.arange(0, PARTS)
    inside = parts < num_parts
    values = tl.load(part_values_ptr + row * num_parts + parts, mask=inside, other=float("-inf"))
    ids = tl.load(part_ids_ptr + row * num_parts + parts, mask=inside, other=_BIG_ID)
    bad = tl.min(ids, 0) < 0
    peak = tl.max(tl.where(values == values, values, float("-inf")), 0)
    lowest = tl.min(tl.where(values == peak, ids, _BIG_ID), 0)
    return tl.where(bad, float("nan"), peak), tl.where(bad, _NO_ID, lowest)


@triton.jit
def _argmax_kernel(part_values_ptr, part_ids_ptr, out_ptr, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, index = _joined_peak(part_values_ptr, part_ids_ptr, row, num_parts, PARTS)
    tl.store(out_ptr + row, index.to(tl.int64))


@triton.jit
def _exp_sums_kernel(
    logits_ptr,
    row_stride,
    size,
    part_values_ptr,
    part_ids_ptr,
    peaks_ptr,
    sums_ptr,
    num_parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak, _ = _joined_peak(part_values_ptr, part_ids_ptr, row, num_parts, PARTS)
    total = tl.zeros((BLOCK,), tl.int64)
    if tl.abs(peak) < float("inf"):
        for begin in range(0, size, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            x = _load_row(logits_ptr + row * row_stride, ids, size)
            total += tl.where(ids < size, _weights(x, peak, 1.0), 0)
    tl.store(peaks_ptr + row, peak)
    tl.store(sums_ptr + row, tl.sum(total, 0))


@triton.jit
def _above(row_ptr, size, peak, temperature, cut, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits are above `cut` (COUNT), or what they weigh."""
    sums = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = _load_row(row_ptr, ids, size)
        is_above = (_ordered(x) > cut) & (ids < size)
        if COUNT:
            sums += is_above.to(tl.int64)
        else:
            sums += tl.where(is_above, _weights(x, peak, temperature), 0)
    return tl.sum(sums, 0)


@triton.jit
def _above_three(row_ptr, size, peak, temperature, low, step, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """`_above` of low + step - 1, low + 2 step - 1 and low + 3 step - 1, in one pass."""
    first = tl.zeros((BLOCK,), tl.int64)
    second = tl.zeros((BLOCK,), tl.int64)
    third = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = _load_row(row_ptr, ids, size)
        value = _ordered(x)
        if COUNT:
            weight = (ids < size).to(tl.int64)
        else:
            weight = tl.where(ids < size, _weights(x, peak, temperature), 0)
        first += tl.where(value > low + step - 1, weight, 0)
        second += tl.where(value > low + 2 * step - 1, weight, 0)
        third += tl.where(value > low + 3 * step - 1, weight, 0)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _find_cut(row_ptr, size, peak, temperature, limit, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest value (as `_ordered` gives it) above which there is less than `limit` (float64)."""
    # The answer is in [low, low + 4 step).
    low = tl.full((), 0, tl.int64)
    step = tl.full((), 1 << 30, tl.int64)
    for _ in range(16):
        first, second, third = _above_three(row_ptr, size, peak, temperature, low, step, COUNT, BLOCK)
        # Above low + j step - 1 lies enough: the answer is not below low + j step.
        low += step * (
            (first.to(tl.float64) >= limit).to(tl.int64)
            + (second.to(tl.float64) >= limit).to(tl.int64)
            + (third.to(tl.float64) >= limit).to(tl.int64)
        )
        step = step // 4
    return low


@triton.jit
def _kept_weights(
    row_ptr,
    size,
    begin,
    num_ties,
    peak,
    temperature,
    cut,
    ties_allowed,
    weight_above,
    limit,
    min_weight,
    BLOCK: tl.constexpr,
):
    """(ids, weights of a block with 0 for what is not kept, ties up to its end). num_ties: logits equal to the cut before the block."""
    ids = begin + tl.arange(0, BLOCK)
    x = _load_row(row_ptr, ids, size)
    weights = tl.where(ids < size, _weights(x, peak, temperature), 0)
    value = _ordered(x)
    is_tie = (value == cut) & (ids < size)
    rank = num_ties + tl.cumsum(is_tie.to(tl.int64), 0) - 1
    tie_is_kept = is_tie & (rank < ties_allowed) & ((weight_above + rank * weights).to(tl.float64) < limit)
    kept = ((value > cut) | tie_is_kept) & (weights >= min_weight)
    return ids, tl.where(kept, weights, 0), num_ties + tl.sum(is_tie.to(tl.int64), 0)


@triton.jit
def _kept_total(
    row_ptr,
    size,
    peak,
    temperature,
    cut,
    ties_allowed,
    weight_above,
    limit,
    min_weight,
    BLOCK: tl.constexpr,
):
    """The sum of what `_kept_weights` gives of a row."""
    total = tl.zeros((), tl.int64)
    num_ties = tl.zeros((), tl.int64)
    for begin in range(0, size, BLOCK):
        _, weights, num_ties = _kept_weights(
            row_ptr,
            size,
            begin,
            num_ties,
            peak,
            temperature,
            cut,
            ties_allowed,
            weight_above,
            limit,
            min_weight,
            BLOCK,
        )
        total += tl.sum(weights, 0)
    return total


@triton.jit
def _draw_kernel(
    logits_ptr,
    row_stride,
    size,
    part_values_ptr,
    part_ids_ptr,
    floats_ptr,
    integers_ptr,
    out_ptr,
    num_rows,
    num_parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """floats: float64[3, rows], temperatures, top_p, u. integers: int64[2, rows], top_k, min_weights."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(floats_ptr + row).to(tl.float32)
    top_p = tl.load(floats_ptr + num_rows + row)
    u = tl.load(floats_ptr + 2 * num_rows + row)
    top_k = tl.load(integers_ptr + row)
    min_weight = tl.load(integers_ptr + num_rows + row)
    peak, index = _joined_peak(part_values_ptr, part_ids_ptr, row, num_parts, PARTS)
    row_ptr = logits_ptr + row * row_stride
    wanted = (tl.abs(peak) < float("inf")) & (temperature >= 0.0)
    result = tl.where(wanted, index.to(tl.int64), -1)
    if wanted & (temperature > 0.0):
        # Nothing is above the cut 2^32, everything above the cut -1.
        cut = tl.full((), -1, tl.int64)
        ties_allowed = tl.full((), 0, tl.int64)
        weight_above = tl.full((), 0, tl.int64)
        limit = tl.full((), float("inf"), tl.float64)
        if (top_k > 0) & (top_k < size):
            cut = _find_cut(row_ptr, size, peak, temperature, top_k.to(tl.float64), True, BLOCK)
            ties_allowed = top_k - _above(row_ptr, size, peak, temperature, cut, True, BLOCK)
        if top_p < 1.0:
            # What top-k leaves: all above its cut, and so many of the ties. Their weights are equal.
            total = _kept_total(row_ptr, size, peak, temperature, cut, ties_allowed, weight_above, limit, 0, BLOCK)
            limit = top_p * total.to(tl.float64)
            cut_of_p = _find_cut(row_ptr, size, peak, temperature, limit, False, BLOCK)
            if cut_of_p > cut:
                cut = cut_of_p
                ties_allowed = tl.zeros((), tl.int64) + size
            weight_above = _above(row_ptr, size, peak, temperature, cut, False, BLOCK)
        total = _kept_total(row_ptr, size, peak, temperature, cut, ties_allowed, weight_above, limit, min_weight, BLOCK)
        target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
        passed = tl.zeros((), tl.int64)
        num_ties = tl.zeros((), tl.int64)
        found = tl.full((), _BIG_ID, tl.int32)
        for begin in range(0, size, BLOCK):
            ids, weights, num_ties = _kept_weights(
                row_ptr,
                size,
                begin,
                num_ties,
                peak,
                temperature,
                cut,
                ties_allowed,
                weight_above,
                limit,
                min_weight,
                BLOCK,
            )
            ends = passed + tl.cumsum(weights, 0)
            found = tl.minimum(found, tl.min(tl.where((ends > target) & (ids < size), ids, _BIG_ID), 0))
            passed += tl.sum(weights, 0)
        result = tl.minimum(found, size - 1).to(tl.int64)
    tl.store(out_ptr + row, result)


def argmax(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    if x.shape[0]:
        values, ids = _peaks(x)
        parts = values.shape[1]
        _argmax_kernel[(x.shape[0],)](values, ids, out, parts, PARTS=triton.next_power_of_2(parts), num_warps=1)
    return out


def exp_sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = x.shape
    peaks = torch.empty(rows, dtype=torch.float32, device=x.device)
    sums = torch.empty(rows, dtype=torch.int64, device=x.device)
    if rows:
        values, ids = _peaks(x)
        parts = values.shape[1]
        _exp_sums_kernel[(rows,)](
            x,
            x.stride(0),
            size,
            values,
            ids,
            peaks,
            sums,
            parts,
            PARTS=triton.next_power_of_2(parts),
            BLOCK=_DRAW_BLOCK,
            num_warps=_DRAW_WARPS,
            **_NO_FUSION,
        )
    return peaks, sums


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_weights: torch.Tensor,
    u: torch.Tensor,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The parameters may be on the CPU (two copies take them over) or on the device."""
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    if masks is not None and mask_rows is not None:
        logits = masked(logits, masks, mask_rows)
    floats = _on_device([temperatures.double(), top_p.double(), u.double()], logits.device)
    integers = _on_device([top_k, min_weights], logits.device)
    values, ids = _peaks(logits)
    parts = values.shape[1]
    _draw_kernel[(rows,)](
        logits,
        logits.stride(0),
        size,
        values,
        ids,
        floats,
        integers,
        out,
        rows,
        parts,
        PARTS=triton.next_power_of_2(parts),
        BLOCK=_DRAW_BLOCK,
        num_warps=_DRAW_WARPS,
        **_NO_FUSION,
    )
    return out


def masked(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> torch.Tensor:
    """float32[rows, V] logits where their masks allow them, -inf elsewhere; see `headrace.kernels.ops.draw`."""
    if logits.stride(1) != 1:
        raise ValueError(f"draw: rows of logits must be contiguous, got strides {logits.stride()}")
    check_mask_rows(mask_rows, len(masks))
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        num_words = masks.shape[1]
        _mask_kernel[(len(logits), triton.cdiv(num_words, _MASK_BLOCK_WORDS))](
            logits,
            logits.stride(0),
            masks.to(logits.device, non_blocking=True),
            mask_rows.to(logits.device, non_blocking=True),
            out,
            out.stride(0),
            logits.shape[1],
            num_words,
            BLOCK_WORDS=_MASK_BLOCK_WORDS,
            num_warps=4,
        )
    return out


def _peaks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value float32[rows, parts] and its lowest id int32[rows, parts] of each part of each row."""
    if x.dtype != torch.float32 or x.stride(1) != 1:
        raise ValueError(f"logits must be float32 and contiguous in a row, got {x.dtype} by {x.stride()}")
    rows, size = x.shape
    parts = triton.cdiv(size, _PEAK_BLOCK)
    values = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=x.device)
    _peak_kernel[(rows, parts)](x, x.stride(0), size, values, ids, parts, BLOCK=_PEAK_BLOCK, num_warps=4)
    return values, ids


def _on_device(columns: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """[len(columns), rows] there, in one copy, without waiting for it."""
    stacked = torch.stack(columns)
    if stacked.device.type == "cpu" and device.type == "cuda":
        stacked = stacked.pin_memory()
    return stacked.to(device, non_blocking=True)
