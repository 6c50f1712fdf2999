"""Device code that decode and extend share: the scan over a range of keys, and the merge of splits."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # finite: a block without a visible key leaves exp2(-inf - lowest) == 0, not NaN


@triton.jit
def scan_keys(
    q,
    top,
    total,
    acc,
    k_ptr,
    v_ptr,
    table_ptr,
    query_positions,
    begin,
    end,
    slot_stride,
    scale,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys begin .. end - 1 join the softmax (top, total, acc) of q [rows, BLOCK_D]. MASKED: some are not for every row."""
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside = positions < end
        # Slots beyond a sequence are junk and what they hold may be NaN: neither is read.
        if MASKED:
            entry = tl.load(table_ptr + positions // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            entry = tl.load(table_ptr + positions // PAGE_SIZE).to(tl.int64)
        offsets = (entry * PAGE_SIZE + positions % PAGE_SIZE) * slot_stride
        k_places = k_ptr + offsets[None, :] + d[:, None]
        v_places = v_ptr + offsets[:, None] + d[None, :]
        if HEAD_DIM == BLOCK_D and not MASKED:
            k = tl.load(k_places)
            v = tl.load(v_places)
        else:
            k = tl.load(k_places, mask=inside[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_places, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        if HAS_SOFT_CAP:
            scores = scores * (scale / soft_cap)
            scores = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores))) * (soft_cap * 1.4426950408889634)
        else:
            scores = scores * (scale * 1.4426950408889634)
        if MASKED:
            seen = inside[None, :] & (positions[None, :] <= query_positions[:, None])
            if HAS_WINDOW:
                seen = seen & (positions[None, :] > query_positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        factor = tl.exp2(top - new_top)
        total = total * factor + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * factor[:, None], input_precision=PRECISION)
        top = new_top
    return top, total, acc


@triton.jit
def merge(top, total, acc, part_top, part):
    """Merge the split (part, with log-sum-exp part_top in base 2) into the splits before it."""
    new_top = tl.maximum(top, part_top)
    factor = tl.exp2(top - new_top)
    share = tl.exp2(part_top - new_top)
    return new_top, total * factor + share, acc * factor[:, None] + part * share[:, None]


@triton.jit
def finished(top, total, acc):
    """A split's result and its log-sum-exp in base 2; zeros and -inf of a row that saw no key."""
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    return acc / divisor[:, None], tl.where(empty, float("-inf"), top + tl.log2(divisor))


@triton.jit
def first_key(seq_len, window, HAS_WINDOW: tl.constexpr):
    """The first key that the last position of a sequence sees."""
    if HAS_WINDOW:
        return tl.maximum(seq_len - window, 0)
    return 0
