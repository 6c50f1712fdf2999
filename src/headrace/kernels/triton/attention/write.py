"""K and V of a step's tokens into the pools, with the rotation of q and k or without."""

import torch
import triton
import triton.language as tl

from headrace.kernels.packing import check_rotation
from headrace.kernels.torch_quantized import FP8, FP8_MAX
from headrace.kernels.triton.attention.plan import check_heads
from headrace.kernels.triton.launch import overlapping, wait_for_previous
from headrace.kernels.triton.rows import load_rotated, rotate_in_place

_ROTATED_ELEMENTS = 1024
"""Pairs that one program rotates."""


@triton.jit
def _store_kv(places, x, inside, CLAMP: tl.constexpr):
    if CLAMP > 0.0:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -CLAMP), CLAMP)
    tl.store(places, x.to(places.dtype.element_ty), mask=inside)


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
        target = slot * pool_slot_stride + offsets
        _store_kv(k_pool_ptr + target, k, inside, CLAMP)
        _store_kv(v_pool_ptr + target, v, inside, CLAMP)


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
    OVERLAPS: tl.constexpr,
):
    """HEADS heads of one token: the first Q_BLOCKS programs rotate q in place, the others rotate k on its way to the pool and copy v."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    wait_for_previous(OVERLAPS)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    if block < Q_BLOCKS:
        heads = (block * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (heads < NUM_Q_HEADS) & (pair < HALF)[None, :]
        rotate_in_place(q_ptr + token * q_token_stride + heads * HEAD_DIM + pair[None, :], cos, sin, inside, HALF)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            heads = ((block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS))[:, None]
            inside = (heads < NUM_KV_HEADS) & (pair < HALF)[None, :]
            offsets = heads * HEAD_DIM + pair[None, :]
            target = slot * pool_slot_stride + offsets
            a, b = load_rotated(k_ptr + token * k_token_stride + offsets, cos, sin, inside, HALF)
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


def write_kv(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Store k, v [tokens, num_kv_heads, head_dim] at slots int32[tokens] of the pools, rounded to their dtype.

    A negative slot is skipped. float8_e4m3fn has no infinity: what is beyond its range becomes its largest value.
    """
    tokens, heads, head_dim = k.shape
    if not tokens:
        return
    check_heads(k, v)
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
        CLAMP=FP8_MAX if k_pool.dtype == FP8 else 0.0,
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
    check_rotation(cos, sin, head_dim)
    if not tokens:
        return
    check_heads(q, k, v)
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
        CLAMP=FP8_MAX if k_pool.dtype == FP8 else 0.0,
        num_warps=4,
        **overlapping(q),
    )
