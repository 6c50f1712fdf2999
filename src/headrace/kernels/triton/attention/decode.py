"""Decode: one query a row, its keys in splits that run side by side, merged by log-sum-exp."""

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.attention.plan import (
    LOWEST,
    Plan,
    decode_tile,
    finished,
    first_key,
    merge,
    num_splits,
    padded,
    scan_keys,
    scan_options,
)
from headrace.kernels.triton.launch import overlapping, wait_for_previous


@triton.jit
def _split_range(
    split, num_splits, seq_len, window, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """[begin, end) of a split of a decode row: SPLIT keys at a multiple of it, or (SPLIT 0) an equal share of those it sees."""
    first = first_key(seq_len, window, HAS_WINDOW)
    if SPLIT > 0:
        low = (first // SPLIT + split) * SPLIT
        return tl.maximum(low, first // BLOCK_N * BLOCK_N), tl.minimum(low + SPLIT, seq_len)
    base = first // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(seq_len - base, num_splits), BLOCK_N) * BLOCK_N
    low = base + split * share
    return low, tl.minimum(low + share, seq_len)


@triton.jit(do_not_specialize=["num_splits", "window", "table_stride"])
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
    OVERLAPS: tl.constexpr,
):
    """One row of one position, one KV head, one split. Rows of more positions are left to `_extend_kernel`."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    wait_for_previous(OVERLAPS)
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
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    query_positions = tl.zeros((BLOCK_M,), tl.int32) + (seq_len - 1)
    head_offset = kv_head * HEAD_DIM
    top, total, acc = scan_keys(
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
    out, part_top = finished(top, total, acc)
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
    OVERLAPS: tl.constexpr,
):
    """Merge the splits of one row and one KV head, in order."""
    row = tl.program_id(0)
    wait_for_previous(OVERLAPS)
    token = tl.load(row_starts_ptr + row)
    if tl.load(row_starts_ptr + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    in_group = tl.arange(0, BLOCK_G)
    heads = tl.program_id(1) * GROUP + in_group
    d = tl.arange(0, BLOCK_D)
    inside = (in_group < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    top = tl.full((BLOCK_G,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    first_part = (row.to(tl.int64) * NUM_Q_HEADS + heads) * num_splits
    for split in range(num_splits):
        begin, end = _split_range(split, num_splits, seq_len, window, SPLIT, BLOCK_N, HAS_WINDOW)
        if begin < end:
            part = first_part + split
            part_top = tl.load(part_top_ptr + part, mask=in_group < GROUP, other=float("-inf"))
            values = tl.load(part_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
            top, total, acc = merge(top, total, acc, part_top, values)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    places = out_ptr + (token.to(tl.int64) * NUM_Q_HEADS + heads[:, None]) * HEAD_DIM + d[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=inside)


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: Plan,
    scale: float,
    window: int,
    soft_cap: float,
    out: torch.Tensor,
) -> None:
    """Attention of the rows that compute one position, into `out`; see `attend`."""
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pool.shape[1]
    group = num_q_heads // num_kv_heads
    fills = plan.fills(num_kv_heads)
    tile = decode_tile(group, head_dim, q.element_size(), deterministic=plan.deterministic, fills=fills)
    splits = num_splits(plan, num_kv_heads, tile.keys, window)
    if splits == 1:
        part, part_top = out, out
    else:
        part = torch.empty(plan.num_rows, num_q_heads, splits, head_dim, dtype=torch.float32, device=q.device)
        part_top = torch.empty(plan.num_rows, num_q_heads, splits, dtype=torch.float32, device=q.device)
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
        ONE_SPLIT=splits == 1,
        **scan_options(q, num_kv_heads, plan, tile, window, soft_cap),
        **overlapping(q),
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
        BLOCK_D=padded(head_dim),
        BLOCK_G=triton.next_power_of_2(group),
        BLOCK_N=tile.keys,
        SPLIT=plan.split,
        HAS_WINDOW=window > 0,
        num_warps=4,
        enable_fp_fusion=not plan.deterministic,
        **overlapping(q),
    )
