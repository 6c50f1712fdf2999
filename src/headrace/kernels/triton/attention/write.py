"""K and V of a step's tokens into the pools; with the rotation of q and k or without, and with the norms of their heads before it."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headrace.kernels.packing import check_rotation
from headrace.kernels.torch_quantized import FP8, FP8_MAX
from headrace.kernels.triton.attention.plan import check_heads
from headrace.kernels.triton.launch import overlapping, wait_for_previous
from headrace.kernels.triton.rows import rotated

_ROTATED_ELEMENTS = 1024
"""Pairs that one program rotates."""


class NewKeys(NamedTuple):
    """K and V of the tokens of a decode step, which its attention rotates and writes itself; see `rotate_write_kv`."""

    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor, float] | None


@triton.jit
def store_kv(places, x, inside, CLAMP: tl.constexpr):
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
        store_kv(k_pool_ptr + target, k, inside, CLAMP)
        store_kv(v_pool_ptr + target, v, inside, CLAMP)


@triton.jit
def _inverse_rms(x, eps, HEAD_DIM: tl.constexpr):
    """1 / sqrt(mean of x^2 + eps) of heads [heads, head_dim] -> float32 [heads, 1]."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1)[:, None] / HEAD_DIM + eps)


@triton.jit
def load_rotated(
    places,
    there,
    norm_ptr,
    cos,
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads at places [heads, 1] -> [heads, BLOCK_D], normalised and rotated, rounded after each. cos, sin [1, BLOCK_D]: 1 and 0 where nothing
    rotates."""
    d = tl.arange(0, BLOCK_D)[None, :]
    other = tl.where(d < HALF, d + HALF, d - HALF)
    inside = there & (d < HEAD_DIM)
    x = tl.load(places + d, mask=inside, other=0.0)
    turned = tl.load(places + other, mask=there & (d < 2 * HALF), other=0.0)
    if HAS_NORM:
        inverse = _inverse_rms(x, eps, HEAD_DIM)
        weights = tl.load(norm_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        other_weights = tl.load(norm_ptr + other, mask=d < 2 * HALF, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * inverse * weights).to(x.dtype)
        turned = (turned.to(tl.float32) * inverse * other_weights).to(x.dtype)
    turned = tl.where(d < HALF, -turned.to(tl.float32), turned.to(tl.float32))
    return (x.to(tl.float32) * cos + turned * sin).to(x.dtype)


@triton.jit
def _load_part(places, inside, inverse, norm_places, HAS_NORM: tl.constexpr):
    """A part of heads; HAS_NORM: times `inverse` and the weights at norm_places, rounded as where the norm is separate."""
    x = tl.load(places, mask=inside, other=0.0)
    if HAS_NORM:
        x = (x.to(tl.float32) * inverse * tl.load(norm_places, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _rotate_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_norm_ptr,
    k_norm_ptr,
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
    eps,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CLAMP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """HEADS heads of one token: the first Q_BLOCKS programs rotate q in place, the others rotate k on its way to the pool and copy v.

    Positions and slots are there before the layers begin: they are read while the kernel before still runs.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    d = tl.arange(0, BLOCK_D)[None, :]
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    wait_for_previous(OVERLAPS)
    inverse = tl.full((HEADS, 1), 1.0, tl.float32)
    if block < Q_BLOCKS:
        heads = (block * HEADS + tl.arange(0, HEADS))[:, None]
        there = heads < NUM_Q_HEADS
        places = q_ptr + token * q_token_stride + heads * HEAD_DIM
        if HAS_NORM:
            inverse = _inverse_rms(tl.load(places + d, mask=there & (d < HEAD_DIM), other=0.0), eps, HEAD_DIM)
        inside = there & (pair < HALF)
        a = _load_part(places + pair, inside, inverse, q_norm_ptr + pair, HAS_NORM)
        b = _load_part(places + HALF + pair, inside, inverse, q_norm_ptr + HALF + pair, HAS_NORM)
        a, b = rotated(a, b, cos, sin)
        tl.store(places + pair, a, mask=inside)
        tl.store(places + HALF + pair, b, mask=inside)
        if HAS_NORM and 2 * HALF < HEAD_DIM:
            inside = there & (d >= 2 * HALF) & (d < HEAD_DIM)
            tl.store(places + d, _load_part(places + d, inside, inverse, q_norm_ptr + d, HAS_NORM), mask=inside)
    else:
        if slot >= 0:
            heads = ((block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS))[:, None]
            there = heads < NUM_KV_HEADS
            places = k_ptr + token * k_token_stride + heads * HEAD_DIM
            target = slot * pool_slot_stride + heads * HEAD_DIM
            if HAS_NORM:
                inverse = _inverse_rms(tl.load(places + d, mask=there & (d < HEAD_DIM), other=0.0), eps, HEAD_DIM)
            inside = there & (pair < HALF)
            a = _load_part(places + pair, inside, inverse, k_norm_ptr + pair, HAS_NORM)
            b = _load_part(places + HALF + pair, inside, inverse, k_norm_ptr + HALF + pair, HAS_NORM)
            a, b = rotated(a, b, cos, sin)
            store_kv(k_pool_ptr + target + pair, a, inside, CLAMP)
            store_kv(k_pool_ptr + target + HALF + pair, b, inside, CLAMP)
            inside = there & (d < HEAD_DIM)
            v = tl.load(v_ptr + token * v_token_stride + heads * HEAD_DIM + d, mask=inside, other=0.0)
            store_kv(v_pool_ptr + target + d, v, inside, CLAMP)
            if 2 * HALF < HEAD_DIM:
                inside = inside & (d >= 2 * HALF)
                k = _load_part(places + d, inside, inverse, k_norm_ptr + d, HAS_NORM)
                store_kv(k_pool_ptr + target + d, k, inside, CLAMP)


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
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """`headrace.kernels.ops.rotary` of q and k, then `write_kv`, in one launch. q is rotated in place; k is left as it is.

    norms: (weights of q, weights of k, eps), both [head_dim]: `headrace.kernels.ops.rms_norm` of every head comes first.
    """
    tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, half = k.shape[1], cos.shape[1]
    check_rotation(cos, sin, head_dim)
    if not tokens:
        return
    check_heads(q, k, v)
    block_half = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(num_q_heads), max(1, _ROTATED_ELEMENTS // block_half))
    q_blocks = triton.cdiv(num_q_heads, heads)
    q_norm, k_norm, eps = norms or (cos, cos, 0.0)
    _rotate_write_kernel[(tokens, q_blocks + triton.cdiv(num_kv_heads, heads))](
        q,
        k,
        v,
        q_norm,
        k_norm,
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
        eps,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HALF=block_half,
        BLOCK_D=triton.next_power_of_2(head_dim),
        HEADS=heads,
        Q_BLOCKS=q_blocks,
        HAS_NORM=norms is not None,
        CLAMP=FP8_MAX if k_pool.dtype == FP8 else 0.0,
        num_warps=4,
        **overlapping(q),
    )
