"""Decode: one query a row, its keys in splits that run side by side, merged by log-sum-exp. It may rotate q and the row's own key, and write that."""

import torch
import triton
import triton.language as tl

from headrace.kernels.torch_quantized import FP8, FP8_MAX
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
from headrace.kernels.triton.attention.write import NewKeys, load_rotated, store_kv
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
    new_k_ptr,
    new_v_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    out_ptr,
    part_ptr,
    part_top_ptr,
    q_token_stride,
    new_k_stride,
    new_v_stride,
    slot_stride,
    table_stride,
    num_splits,
    scale,
    soft_cap,
    window,
    eps,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CLAMP: tl.constexpr,
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
    """One row of one position, one KV head, one split. Rows of more positions are left to `_extend_kernel`.

    HALF > 0: q and the row's own k are rotated here, and the program whose split ends with it writes k and v first; all rows have one position then.
    Lengths and positions are there before the layers begin: they are read while the kernel before still runs.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(row_starts_ptr + row)
    end_token = tl.load(row_starts_ptr + row + 1)
    seq_len = tl.load(seq_lens_ptr + row)
    d = tl.arange(0, BLOCK_D)
    if HALF > 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        pair = tl.load(positions_ptr + row).to(tl.int64) * HALF + d % HALF
        cos = tl.load(cos_ptr + pair, mask=d < 2 * HALF, other=1.0)[None, :]
        sin = tl.load(sin_ptr + pair, mask=d < 2 * HALF, other=0.0)[None, :]
    wait_for_previous(OVERLAPS)
    if end_token - token != 1:
        return
    begin, end = _split_range(split, num_splits, seq_len, window, SPLIT, BLOCK_N, HAS_WINDOW)
    if begin >= end and not ONE_SPLIT:
        return
    in_group = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + in_group
    inside = (in_group < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    token = token.to(tl.int64)
    q_places = q_ptr + token * q_token_stride + heads[:, None] * HEAD_DIM
    if HALF > 0:
        in_row = (in_group < GROUP)[:, None]
        q = load_rotated(q_places, in_row, q_norm_ptr, cos, sin, eps, HEAD_DIM, BLOCK_D, HALF, HAS_NORM)
        if end == seq_len and slot >= 0:
            one = tl.zeros((1, 1), tl.int32)
            k_places = new_k_ptr + token * new_k_stride + kv_head * HEAD_DIM + one
            k = load_rotated(k_places, one == 0, k_norm_ptr, cos, sin, eps, HEAD_DIM, BLOCK_D, HALF, HAS_NORM)
            in_head = (d < HEAD_DIM)[None, :]
            v = tl.load(new_v_ptr + token * new_v_stride + kv_head * HEAD_DIM + d[None, :], mask=in_head, other=0.0)
            target = slot * slot_stride + kv_head * HEAD_DIM + d[None, :]
            store_kv(k_ptr + target, k, in_head, CLAMP)
            store_kv(v_ptr + target, v, in_head, CLAMP)
            tl.debug_barrier()
    else:
        q = tl.load(q_places + d[None, :], mask=inside, other=0.0)
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
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Merge the splits of one row and one query head, in order. Several are on their way at a time; one without keys changes nothing."""
    row = tl.program_id(0)
    token = tl.load(row_starts_ptr + row)
    end_token = tl.load(row_starts_ptr + row + 1)
    seq_len = tl.load(seq_lens_ptr + row)
    wait_for_previous(OVERLAPS)
    if end_token - token != 1:
        return
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    top = tl.full((1,), LOWEST, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    first_part = (row.to(tl.int64) * NUM_Q_HEADS + head) * num_splits
    for split in tl.range(0, num_splits, num_stages=4):
        begin, end = _split_range(split, num_splits, seq_len, window, SPLIT, BLOCK_N, HAS_WINDOW)
        part_top = tl.load(part_top_ptr + first_part + split, mask=begin < end, other=float("-inf"))
        places = part_ptr + (first_part + split) * HEAD_DIM + d[None, :]
        values = tl.load(places, mask=(begin < end) & (d < HEAD_DIM)[None, :], other=0.0)
        top, total, acc = merge(top, total, acc, part_top, values)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    places = out_ptr + (token.to(tl.int64) * NUM_Q_HEADS + head) * HEAD_DIM + d[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=(d < HEAD_DIM)[None, :])


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: Plan,
    scale: float,
    window: int,
    soft_cap: float,
    out: torch.Tensor,
    new: NewKeys | None = None,
) -> None:
    """Attention of the rows that compute one position, into `out`; see `attend`. new: given, every row does, and no two are of one sequence."""
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
    k, v, positions, cos, sin, slots, norms = new or (q, q, q, q, q, q, None)
    q_norm, k_norm, eps = norms or (q, q, 0.0)
    _decode_kernel[(plan.num_rows, num_kv_heads, splits)](
        q,
        k_pool,
        v_pool,
        plan.table,
        plan.seq_lens,
        plan.row_starts,
        k,
        v,
        positions,
        cos,
        sin,
        slots,
        q_norm,
        k_norm,
        out,
        part,
        part_top,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        k_pool.stride(0),
        plan.table.stride(0),
        splits,
        scale,
        soft_cap or 1.0,
        window,
        eps,
        HALF=0 if new is None else cos.shape[1],
        HAS_NORM=norms is not None,
        CLAMP=FP8_MAX if k_pool.dtype == FP8 else 0.0,
        ONE_SPLIT=splits == 1,
        **scan_options(q, num_kv_heads, plan, tile, window, soft_cap),
        **overlapping(q),
    )
    if splits == 1:
        return
    _reduce_kernel[(plan.num_rows, num_q_heads)](
        part,
        part_top,
        plan.seq_lens,
        plan.row_starts,
        out,
        splits,
        window,
        NUM_Q_HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim),
        BLOCK_N=tile.keys,
        SPLIT=plan.split,
        HAS_WINDOW=window > 0,
        num_warps=1,
        enable_fp_fusion=not plan.deterministic,
        **overlapping(q),
    )
