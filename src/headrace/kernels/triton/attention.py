"""Attention over a KV pool addressed by slot, in Triton: decode with split keys, extend with a causal prefix, and the write before both.

Sources: the tiling and the online softmax are FlashAttention-2's (T. Dao, 2023) as Triton's tutorial "Fused Attention" shows them; the
split keys of decode and their merge by log-sum-exp are Flash-Decoding's (T. Dao, D. Haziza, F. Massa and G. Sizov, 2023); pages are
PagedAttention's (W. Kwon et al., 2023). The query heads of one KV head share a tile, so that a key is read once for all of them
(J. Ainslie et al., "GQA", 2023).

K and V of a layer: [num_slots, num_kv_heads, head_dim], the last dimension contiguous; bfloat16, float16, float32 or float8_e4m3fn. The slot of
position p of row r is table[r, p // page_size] * page_size + p % page_size: with page_size 1 the table holds slots.

All lengths are read on the device; grids follow from sizes that the host knows, so a launch can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

DETERMINISTIC_SPLIT = 512
"""Keys of a split when bits must not depend on the batch: splits then begin at multiples of it."""

DETERMINISTIC_ROWS = 64
"""Rows of every tile in that mode: decode and extend must multiply in the same shapes to give the same bits."""

MAX_SPLITS = 64
_ROTATED_ELEMENTS = 1024
"""Pairs that one program rotates."""

LOG2_E = 1.4426950408889634
FP8_LIMIT = 448.0

_LOWEST = tl.constexpr(-1e30)  # finite: a block without a visible key leaves exp2(-inf - lowest) == 0, not NaN


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a kernel's tiles and how it is compiled. rows: query rows. keys: keys of a block."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the layers of a step share.

    table: int32[num_rows, columns], see the module. seq_lens: int32[num_rows], keys with this step's; row_starts: int32[num_rows + 1].
    num_tokens: rows of q. max_keys: no sequence is longer. has_single, has_longer: whether a row computes one position, or more.
    num_processors: of the device.
    """

    table: torch.Tensor
    page_size: int
    seq_lens: torch.Tensor
    row_starts: torch.Tensor
    num_tokens: int
    max_keys: int
    has_single: bool
    has_longer: bool
    deterministic: bool
    num_processors: int

    @property
    def num_rows(self) -> int:
        """Sequences of the step."""
        return self.seq_lens.shape[0]


@triton.jit
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    k_token_stride,
    v_token_stride,
    pool_slot_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CLAMP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        heads = tl.arange(0, BLOCK_HEADS)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        inside = (heads < NUM_HEADS) & (d < HEAD_DIM)
        offsets = heads * HEAD_DIM + d
        k = tl.load(k_ptr + token * k_token_stride + offsets, mask=inside)
        v = tl.load(v_ptr + token * v_token_stride + offsets, mask=inside)
        if CLAMP > 0.0:
            k = tl.minimum(tl.maximum(k.to(tl.float32), -CLAMP), CLAMP)
            v = tl.minimum(tl.maximum(v.to(tl.float32), -CLAMP), CLAMP)
        target = slot * pool_slot_stride + offsets
        tl.store(k_pool_ptr + target, k.to(k_pool_ptr.dtype.element_ty), mask=inside)
        tl.store(v_pool_ptr + target, v.to(v_pool_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_rotated(places, cos, sin, inside, HALF: tl.constexpr):
    """The two halves at `places` and HALF further on, rotated and rounded to their dtype."""
    a = tl.load(places, mask=inside, other=0.0)
    b = tl.load(places + HALF, mask=inside, other=0.0)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    return (wide_a * cos - wide_b * sin).to(a.dtype), (wide_b * cos + wide_a * sin).to(b.dtype)


@triton.jit
def _store_kv(places, x, inside, CLAMP: tl.constexpr):
    if CLAMP > 0.0:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -CLAMP), CLAMP)
    tl.store(places, x.to(places.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    q_token_stride,
    k_token_stride,
    v_token_stride,
    pool_slot_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    CLAMP: tl.constexpr,
):
    """HEADS heads of one token: the first Q_BLOCKS programs rotate q in place, the others rotate k on its way to the pool and copy v."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    if block < Q_BLOCKS:
        heads = (block * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (heads < NUM_Q_HEADS) & (pair < HALF)[None, :]
        places = q_ptr + token * q_token_stride + heads * HEAD_DIM + pair[None, :]
        a, b = _load_rotated(places, cos, sin, inside, HALF)
        tl.store(places, a, mask=inside)
        tl.store(places + HALF, b, mask=inside)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            heads = ((block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS))[:, None]
            inside = (heads < NUM_KV_HEADS) & (pair < HALF)[None, :]
            offsets = heads * HEAD_DIM + pair[None, :]
            target = slot * pool_slot_stride + offsets
            a, b = _load_rotated(k_ptr + token * k_token_stride + offsets, cos, sin, inside, HALF)
            _store_kv(k_pool_ptr + target, a, inside, CLAMP)
            _store_kv(k_pool_ptr + target + HALF, b, inside, CLAMP)
            d = tl.arange(0, BLOCK_D)[None, :]
            inside = (heads < NUM_KV_HEADS) & (d < HEAD_DIM)
            offsets = heads * HEAD_DIM + d
            target = slot * pool_slot_stride + offsets
            v = tl.load(v_ptr + token * v_token_stride + offsets, mask=inside, other=0.0)
            _store_kv(v_pool_ptr + target, v, inside, CLAMP)
            if 2 * HALF < HEAD_DIM:
                inside = inside & (d >= 2 * HALF)
                k = tl.load(k_ptr + token * k_token_stride + offsets, mask=inside, other=0.0)
                _store_kv(k_pool_ptr + target, k, inside, CLAMP)


@triton.jit
def _scan_keys(
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
def _merge(top, total, acc, part_top, part):
    """The split (part, with log-sum-exp part_top in base 2) joins what was merged before it."""
    new_top = tl.maximum(top, part_top)
    factor = tl.exp2(top - new_top)
    share = tl.exp2(part_top - new_top)
    return new_top, total * factor + share, acc * factor[:, None] + part * share[:, None]


@triton.jit
def _finished(top, total, acc):
    """A split's result and its log-sum-exp in base 2; zeros and -inf of a row that saw no key."""
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    return acc / divisor[:, None], tl.where(empty, float("-inf"), top + tl.log2(divisor))


@triton.jit
def _first_key(seq_len, window, HAS_WINDOW: tl.constexpr):
    """The first key that the last position of a sequence sees."""
    if HAS_WINDOW:
        return tl.maximum(seq_len - window, 0)
    return 0


@triton.jit
def _split_range(
    split, num_splits, seq_len, window, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """[begin, end) of a split of a decode row: SPLIT keys at a multiple of it, or (SPLIT 0) an equal share of those it sees."""
    first = _first_key(seq_len, window, HAS_WINDOW)
    if SPLIT > 0:
        low = (first // SPLIT + split) * SPLIT
        return tl.maximum(low, first // BLOCK_N * BLOCK_N), tl.minimum(low + SPLIT, seq_len)
    base = first // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(seq_len - base, num_splits), BLOCK_N) * BLOCK_N
    low = base + split * share
    return low, tl.minimum(low + share, seq_len)


@triton.jit(do_not_specialize=["num_splits", "window"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seq_lens_ptr,
    row_starts_ptr,
    out_ptr,
    part_ptr,
    part_top_ptr,
    q_token_stride,
    slot_stride,
    table_stride,
    num_splits,
    scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row of one position, one KV head, one split. Rows of more positions are left to `_extend_kernel`."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(row_starts_ptr + row)
    if tl.load(row_starts_ptr + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    begin, end = _split_range(split, num_splits, seq_len, window, SPLIT, BLOCK_N, HAS_WINDOW)
    if begin >= end and not ONE_SPLIT:
        return
    in_group = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + in_group
    inside = (in_group < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    token = token.to(tl.int64)
    q = tl.load(q_ptr + token * q_token_stride + heads[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    top = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    query_positions = tl.zeros((BLOCK_M,), tl.int32) + (seq_len - 1)
    head_offset = kv_head * HEAD_DIM
    top, total, acc = _scan_keys(
        q,
        top,
        total,
        acc,
        k_ptr + head_offset,
        v_ptr + head_offset,
        table_ptr + row.to(tl.int64) * table_stride,
        query_positions,
        begin,
        end,
        slot_stride,
        scale,
        soft_cap,
        window,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        PAGE_SIZE,
        True,
        HAS_WINDOW,
        HAS_SOFT_CAP,
        PRECISION,
    )
    out, part_top = _finished(top, total, acc)
    if ONE_SPLIT:
        places = out_ptr + (token * NUM_Q_HEADS + heads[:, None]) * HEAD_DIM + d[None, :]
        tl.store(places, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = (row.to(tl.int64) * NUM_Q_HEADS + heads) * num_splits + split
        tl.store(part_ptr + part[:, None] * HEAD_DIM + d[None, :], out, mask=inside)
        tl.store(part_top_ptr + part, part_top, mask=in_group < GROUP)


@triton.jit(do_not_specialize=["num_splits", "window"])
def _reduce_kernel(
    part_ptr,
    part_top_ptr,
    seq_lens_ptr,
    row_starts_ptr,
    out_ptr,
    num_splits,
    window,
    GROUP: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """The splits of one row and one KV head, merged in order."""
    row = tl.program_id(0)
    token = tl.load(row_starts_ptr + row)
    if tl.load(row_starts_ptr + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    in_group = tl.arange(0, BLOCK_G)
    heads = tl.program_id(1) * GROUP + in_group
    d = tl.arange(0, BLOCK_D)
    inside = (in_group < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    top = tl.full((BLOCK_G,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    first_part = (row.to(tl.int64) * NUM_Q_HEADS + heads) * num_splits
    for split in range(num_splits):
        begin, end = _split_range(split, num_splits, seq_len, window, SPLIT, BLOCK_N, HAS_WINDOW)
        if begin < end:
            part = first_part + split
            part_top = tl.load(part_top_ptr + part, mask=in_group < GROUP, other=float("-inf"))
            values = tl.load(part_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
            top, total, acc = _merge(top, total, acc, part_top, values)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    places = out_ptr + (token.to(tl.int64) * NUM_Q_HEADS + heads[:, None]) * HEAD_DIM + d[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "window"])
def _extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seq_lens_ptr,
    row_starts_ptr,
    out_ptr,
    num_rows,
    q_token_stride,
    slot_stride,
    table_stride,
    scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    SKIP_SINGLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile: as many positions of one row as fit with all query heads of one KV head. Key blocks begin at multiples of BLOCK_N."""
    POSITIONS: tl.constexpr = BLOCK_M // GROUP
    # The last tiles of a row have the most keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    # Row r begins at tile row_starts[r] // POSITIONS + r at the latest: the last row that begins at or before this tile has it.
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(row_starts_ptr + middle) // POSITIONS + middle <= tile:
            low = middle
        else:
            high = middle
    row = tl.zeros((), tl.int32) + low
    row_start = tl.load(row_starts_ptr + row)
    count = tl.load(row_starts_ptr + row + 1) - row_start
    first = (tile - row_start // POSITIONS - row) * POSITIONS
    if first >= count:
        return
    if SKIP_SINGLE and count == 1:
        return
    start_position = tl.load(seq_lens_ptr + row) - count
    lowest_position = start_position + first
    end = start_position + tl.minimum(first + POSITIONS, count)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_row = first + m // GROUP
    heads = kv_head * GROUP + m % GROUP
    inside = ((m < POSITIONS * GROUP) & (in_row < count))[:, None] & (d < HEAD_DIM)[None, :]
    tokens = (row_start + in_row).to(tl.int64)
    q = tl.load(q_ptr + (tokens * q_token_stride + heads * HEAD_DIM)[:, None] + d[None, :], mask=inside, other=0.0)
    query_positions = start_position + in_row
    row_table = table_ptr + row.to(tl.int64) * table_stride
    k_head = k_ptr + kv_head * HEAD_DIM
    v_head = v_ptr + kv_head * HEAD_DIM
    top = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin = _first_key(lowest_position + 1, window, HAS_WINDOW) // BLOCK_N * BLOCK_N
    if SPLIT > 0:
        # As decode does it: every split on its own, then merged in order.
        for split_begin in range(begin // SPLIT * SPLIT, end, SPLIT):
            part_top = tl.full((BLOCK_M,), _LOWEST, tl.float32)
            part_total = tl.zeros((BLOCK_M,), tl.float32)
            part = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            part_top, part_total, part = _scan_keys(
                q,
                part_top,
                part_total,
                part,
                k_head,
                v_head,
                row_table,
                query_positions,
                tl.maximum(split_begin, begin),
                tl.minimum(split_begin + SPLIT, end),
                slot_stride,
                scale,
                soft_cap,
                window,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_N,
                PAGE_SIZE,
                True,
                HAS_WINDOW,
                HAS_SOFT_CAP,
                PRECISION,
            )
            part, part_top = _finished(part_top, part_total, part)
            top, total, acc = _merge(top, total, acc, part_top, part)
    else:
        # Blocks that every row of the tile sees whole need no mask: those between the last window's begin and the first position.
        clear_begin = begin
        if HAS_WINDOW:
            last_window = tl.maximum(end - window, 0)
            clear_begin = tl.maximum(begin, tl.minimum(tl.cdiv(last_window, BLOCK_N) * BLOCK_N, end))
            top, total, acc = _scan_keys(
                q,
                top,
                total,
                acc,
                k_head,
                v_head,
                row_table,
                query_positions,
                begin,
                clear_begin,
                slot_stride,
                scale,
                soft_cap,
                window,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_N,
                PAGE_SIZE,
                True,
                HAS_WINDOW,
                HAS_SOFT_CAP,
                PRECISION,
            )
        clear_end = tl.maximum(clear_begin, (lowest_position + 1) // BLOCK_N * BLOCK_N)
        top, total, acc = _scan_keys(
            q,
            top,
            total,
            acc,
            k_head,
            v_head,
            row_table,
            query_positions,
            clear_begin,
            clear_end,
            slot_stride,
            scale,
            soft_cap,
            window,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            PAGE_SIZE,
            False,
            HAS_WINDOW,
            HAS_SOFT_CAP,
            PRECISION,
        )
        top, total, acc = _scan_keys(
            q,
            top,
            total,
            acc,
            k_head,
            v_head,
            row_table,
            query_positions,
            clear_end,
            end,
            slot_stride,
            scale,
            soft_cap,
            window,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            PAGE_SIZE,
            True,
            HAS_WINDOW,
            HAS_SOFT_CAP,
            PRECISION,
        )
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    places = out_ptr + ((tokens * NUM_Q_HEADS + heads) * HEAD_DIM)[:, None] + d[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=inside)


def write_kv(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Store k, v [tokens, num_kv_heads, head_dim] at slots int32[tokens] of the pools, rounded to their dtype.

    A negative slot is skipped. float8_e4m3fn has no infinity: what is beyond its range becomes its largest value.
    """
    tokens, heads, head_dim = k.shape
    if not tokens:
        return
    _check_heads(k, v)
    _write_kv_kernel[(tokens,)](
        k,
        v,
        k_pool,
        v_pool,
        slots,
        k.stride(0),
        v.stride(0),
        k_pool.stride(0),
        NUM_HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        CLAMP=FP8_LIMIT if k_pool.dtype == torch.float8_e4m3fn else 0.0,
        num_warps=4,
    )


def rotate_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`headrace.kernels.ops.rotary` of q and k, then `write_kv`, in one launch. q is rotated in place; k is left as it is."""
    tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, half = k.shape[1], cos.shape[1]
    if cos.shape != sin.shape or 2 * half > head_dim:
        raise ValueError(f"rotary: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit head_dim {head_dim}")
    if not tokens:
        return
    _check_heads(q, k, v)
    block_half = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(num_q_heads), max(1, _ROTATED_ELEMENTS // block_half))
    q_blocks = triton.cdiv(num_q_heads, heads)
    _rotate_write_kernel[(tokens, q_blocks + triton.cdiv(num_kv_heads, heads))](
        q,
        k,
        v,
        positions,
        cos,
        sin,
        k_pool,
        v_pool,
        slots,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        k_pool.stride(0),
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HALF=block_half,
        BLOCK_D=triton.next_power_of_2(head_dim),
        HEADS=heads,
        Q_BLOCKS=q_blocks,
        CLAMP=FP8_LIMIT if k_pool.dtype == torch.float8_e4m3fn else 0.0,
        num_warps=4,
    )


def attend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: Plan,
    scale: float,
    *,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    """Causal attention of q [num_tokens, num_q_heads, head_dim] over the pools -> [num_tokens, num_q_heads, head_dim], contiguous.

    Tokens are in the order of the plan's rows; their K and V are in the pools already. window, soft_cap: 0 = none.
    Deterministic: the bits of a token depend on its position, its own sequence, and nothing else.
    """
    _check_heads(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.has_single:
        _decode(q, k_pool, v_pool, plan, scale, window, soft_cap, out)
    if plan.has_longer:
        _extend(q, k_pool, v_pool, plan, scale, window, soft_cap, out)
    return out


def decode_tile(group: int, head_dim: int, itemsize: int, *, deterministic: bool) -> Tile:
    """A decode tile: the group's query heads, padded to what a matrix product takes, against as many keys as fill the copies."""
    rows = DETERMINISTIC_ROWS if deterministic else 16
    keys = _keys(head_dim, itemsize)
    return Tile(max(rows, triton.next_power_of_2(group)), keys, 4, _stages(head_dim, keys, itemsize))


def extend_tile(group: int, head_dim: int, itemsize: int, *, deterministic: bool) -> Tile:
    """An extend tile. In deterministic mode of decode's shape; else larger, as the products and not the copies take the time."""
    if deterministic:
        return decode_tile(group, head_dim, itemsize, deterministic=True)
    rows = 64 if itemsize > 2 or head_dim > 128 else 128
    keys = _keys(head_dim, itemsize)
    rows = max(rows, triton.next_power_of_2(group))
    return Tile(rows, keys, 8 if rows >= 128 or head_dim > 128 else 4, _stages(head_dim, keys, itemsize))


def num_splits(plan: Plan, num_kv_heads: int, keys: int, window: int) -> int:
    """Into how many splits decode cuts each sequence: enough to fill the device, or (deterministic) as many as the longest may need."""
    longest = min(plan.max_keys, window + keys) if window else plan.max_keys
    if plan.deterministic:
        # A window may begin within a split.
        return triton.cdiv(longest, DETERMINISTIC_SPLIT) + (1 if window else 0)
    wanted = triton.cdiv(2 * plan.num_processors, max(plan.num_rows * num_kv_heads, 1))
    return max(1, min(wanted, MAX_SPLITS, triton.cdiv(longest, 2 * keys)))


def _decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: Plan,
    scale: float,
    window: int,
    soft_cap: float,
    out: torch.Tensor,
) -> None:
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pool.shape[1]
    group = num_q_heads // num_kv_heads
    tile = decode_tile(group, head_dim, q.element_size(), deterministic=plan.deterministic)
    splits = num_splits(plan, num_kv_heads, tile.keys, window)
    if splits == 1:
        part, part_top = out, out
    else:
        part = torch.empty(plan.num_rows, num_q_heads, splits, head_dim, dtype=torch.float32, device=q.device)
        part_top = torch.empty(plan.num_rows, num_q_heads, splits, dtype=torch.float32, device=q.device)
    split = DETERMINISTIC_SPLIT if plan.deterministic else 0
    _decode_kernel[(plan.num_rows, num_kv_heads, splits)](
        q,
        k_pool,
        v_pool,
        plan.table,
        plan.seq_lens,
        plan.row_starts,
        out,
        part,
        part_top,
        q.stride(0),
        k_pool.stride(0),
        plan.table.stride(0),
        splits,
        scale,
        soft_cap or 1.0,
        window,
        GROUP=group,
        NUM_Q_HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=_padded(head_dim),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        PAGE_SIZE=plan.page_size,
        SPLIT=split,
        ONE_SPLIT=splits == 1,
        HAS_WINDOW=window > 0,
        HAS_SOFT_CAP=soft_cap > 0.0,
        PRECISION=_precision(q),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=not plan.deterministic,
    )
    if splits == 1:
        return
    _reduce_kernel[(plan.num_rows, num_kv_heads)](
        part,
        part_top,
        plan.seq_lens,
        plan.row_starts,
        out,
        splits,
        window,
        GROUP=group,
        NUM_Q_HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=_padded(head_dim),
        BLOCK_G=triton.next_power_of_2(group),
        BLOCK_N=tile.keys,
        SPLIT=split,
        HAS_WINDOW=window > 0,
        num_warps=4,
        enable_fp_fusion=not plan.deterministic,
    )


def _extend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: Plan,
    scale: float,
    window: int,
    soft_cap: float,
    out: torch.Tensor,
) -> None:
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pool.shape[1]
    group = num_q_heads // num_kv_heads
    tile = extend_tile(group, head_dim, q.element_size(), deterministic=plan.deterministic)
    most_tiles = plan.num_tokens // (tile.rows // group) + plan.num_rows
    _extend_kernel[(most_tiles, num_kv_heads)](
        q,
        k_pool,
        v_pool,
        plan.table,
        plan.seq_lens,
        plan.row_starts,
        out,
        plan.num_rows,
        q.stride(0),
        k_pool.stride(0),
        plan.table.stride(0),
        scale,
        soft_cap or 1.0,
        window,
        GROUP=group,
        NUM_Q_HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=_padded(head_dim),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        PAGE_SIZE=plan.page_size,
        SPLIT=DETERMINISTIC_SPLIT if plan.deterministic else 0,
        SKIP_SINGLE=plan.has_single,
        HAS_WINDOW=window > 0,
        HAS_SOFT_CAP=soft_cap > 0.0,
        PRECISION=_precision(q),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=not plan.deterministic,
    )


def _keys(head_dim: int, itemsize: int) -> int:
    """Keys of a block: K and V of two or three blocks must fit in shared memory."""
    keys = 128 if head_dim <= 64 else 64 if head_dim <= 128 else 32
    return keys if itemsize <= 2 else keys // 2


def _stages(head_dim: int, keys: int, itemsize: int) -> int:
    """Blocks in flight: three where shared memory of the smallest supported GPU (99 KiB) holds them, else two."""
    block_bytes = 2 * keys * _padded(head_dim) * itemsize
    return 3 if 3 * block_bytes <= 96 << 10 else 2


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _precision(q: torch.Tensor) -> str:
    """float32 products in full, not in TF32."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _check_heads(*tensors: torch.Tensor) -> None:
    for x in tensors:
        if x.dim() != 3 or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            raise ValueError(f"attention: heads must lie side by side in a row, got {tuple(x.shape)} by {x.stride()}")
