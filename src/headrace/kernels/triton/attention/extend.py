"""Extend: many queries of a row over its prefix and, causally, over each other."""

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.attention.plan import (
    LOWEST,
    Plan,
    extend_tile,
    finished,
    first_key,
    merge,
    scan_keys,
    scan_options,
)


@triton.jit(do_not_specialize=["num_rows", "window", "table_stride"])
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
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin = first_key(lowest_position + 1, window, HAS_WINDOW) // BLOCK_N * BLOCK_N
    if SPLIT > 0:
        # As decode does it: every split on its own, then merged in order.
        for split_begin in range(begin // SPLIT * SPLIT, end, SPLIT):
            part_top = tl.full((BLOCK_M,), LOWEST, tl.float32)
            part_total = tl.zeros((BLOCK_M,), tl.float32)
            part = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            low = tl.maximum(split_begin, begin)
            high = tl.minimum(split_begin + SPLIT, end)
            masked_from = low
            if not HAS_WINDOW:
                # A mask that hides nothing changes no bit.
                masked_from = tl.minimum(tl.maximum((lowest_position + 1) // BLOCK_N * BLOCK_N, low), high)
                part_top, part_total, part = scan_keys(
                    q,
                    part_top,
                    part_total,
                    part,
                    k_head,
                    v_head,
                    row_table,
                    query_positions,
                    low,
                    masked_from,
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
            part_top, part_total, part = scan_keys(
                q,
                part_top,
                part_total,
                part,
                k_head,
                v_head,
                row_table,
                query_positions,
                masked_from,
                high,
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
            part, part_top = finished(part_top, part_total, part)
            top, total, acc = merge(top, total, acc, part_top, part)
    else:
        # Blocks that every row of the tile sees whole need no mask: those between the last window's begin and the first position.
        clear_begin = begin
        if HAS_WINDOW:
            last_window = tl.maximum(end - window, 0)
            clear_begin = tl.maximum(begin, tl.minimum(tl.cdiv(last_window, BLOCK_N) * BLOCK_N, end))
            top, total, acc = scan_keys(
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
        top, total, acc = scan_keys(
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
        top, total, acc = scan_keys(
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


def extend_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: Plan,
    scale: float,
    window: int,
    soft_cap: float,
    out: torch.Tensor,
) -> None:
    """Attention of the rows that compute several positions, into `out`; see `attend`."""
    num_kv_heads = k_pool.shape[1]
    group = q.shape[1] // num_kv_heads
    tile = extend_tile(group, q.shape[2], q.element_size(), deterministic=plan.deterministic)
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
        SKIP_SINGLE=plan.has_single,
        **scan_options(q, num_kv_heads, plan, tile, window, soft_cap),
    )
