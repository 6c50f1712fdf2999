"""Ops on rows, in Triton: norms with their residual, rotary embedding, gated activations.

Owns their arithmetic: float32 inside, as in the torch implementation, rounded once at the end. One program takes a row (several where
rows are short), so a row's bits depend on that row alone. Sources: Triton's tutorials "Fused Softmax" and "Layer Normalization" for the
shape of such a kernel.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.packing import check_rotation
from headrace.kernels.triton.launch import overlapping, wait_for_previous

_TILE_ELEMENTS = 2048


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    in_size = columns < SIZE
    inside = (rows < num_rows) & in_size
    weight = tl.load(weight_ptr + columns, mask=in_size, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    x = tl.load(x_ptr + rows * x_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        places = residual_ptr + rows * SIZE + columns
        residual = tl.load(places, mask=inside, other=0.0)
        # The stream is rounded to its dtype before it is normalised: what the next layer reads is what this one normalises.
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(residual.dtype)
        tl.store(places, x, mask=inside)
    wide = x.to(tl.float32)
    if CENTERED:
        mean = tl.sum(wide, 1)[:, None] / SIZE
        wide = tl.where(in_size, wide - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1)[:, None] / SIZE + eps)
    y = wide * inverse * weight
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=in_size, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * SIZE + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rotated(a, b, cos, sin):
    """The two halves of heads, rotated and rounded to their dtype."""
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    return (wide_a * cos - wide_b * sin).to(a.dtype), (wide_b * cos + wide_a * sin).to(b.dtype)


@triton.jit
def _rotate_in_place(places, cos, sin, inside, HALF: tl.constexpr):
    a, b = rotated(tl.load(places, mask=inside, other=0.0), tl.load(places + HALF, mask=inside, other=0.0), cos, sin)
    tl.store(places, a, mask=inside)
    tl.store(places + HALF, b, mask=inside)


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    q_stride,
    k_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """HEADS heads of one token; those of k follow those of q."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    of_q = ((head < NUM_Q_HEADS)[:, None]) & (pair < HALF)[None, :]
    places = q_ptr + token * q_stride + head[:, None] * HEAD_DIM + pair[None, :]
    _rotate_in_place(places, cos, sin, of_q, HALF)
    k_head = head - NUM_Q_HEADS
    of_k = ((k_head >= 0) & (k_head < NUM_K_HEADS))[:, None] & (pair < HALF)[None, :]
    _rotate_in_place(k_ptr + token * k_stride + k_head[:, None] * HEAD_DIM + pair[None, :], cos, sin, of_k, HALF)


@triton.jit
def activate(x, GELU: tl.constexpr):
    """silu or gelu (tanh form) of float32, by exp alone."""
    if GELU:
        # 0.5 (1 + tanh(z)) is the logistic function of 2 z.
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * z))
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gate_kernel(x_ptr, out_ptr, x_stride, size, BLOCK: tl.constexpr, GELU: tl.constexpr, OVERLAPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    wait_for_previous(OVERLAPS)
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + size + columns, mask=inside, other=0.0)
    # The activation is rounded before it multiplies, as it is where the two are separate operations.
    gate = activate(gate.to(tl.float32), GELU).to(gate.dtype)
    tl.store(out_ptr + row * size + columns, gate * up, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    return _norm(x, weight, None, eps, residual, centered=False)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, residual: torch.Tensor | None
) -> torch.Tensor:
    return _norm(x, weight, bias, eps, residual, centered=True)


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    tokens, num_q_heads, head_dim = q.shape
    num_k_heads, half = k.shape[1], cos.shape[1]
    check_rotation(cos, sin, head_dim)
    for x in (q, k):
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            raise ValueError(f"rotary: heads must lie side by side in a row, got {tuple(x.shape)} by {x.stride()}")
    if not tokens:
        return
    block_half = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(num_q_heads + num_k_heads), max(1, _TILE_ELEMENTS // 2 // block_half))
    _rotary_kernel[(tokens, triton.cdiv(num_q_heads + num_k_heads, heads))](
        q,
        k,
        positions,
        cos,
        sin,
        q.stride(0),
        k.stride(0),
        NUM_Q_HEADS=num_q_heads,
        NUM_K_HEADS=num_k_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HALF=block_half,
        HEADS=heads,
        num_warps=4,
    )


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    return _gate("silu_mul", x, gelu=False)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    return _gate("gelu_tanh_mul", x, gelu=True)


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    *,
    centered: bool,
) -> torch.Tensor:
    rows, size = x.shape
    if weight.shape != (size,):
        raise ValueError(f"norm: the weight must be [{size}], got {tuple(weight.shape)}")
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(f"norm: residual must be contiguous and {tuple(x.shape)}, got {tuple(residual.shape)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, size, dtype=x.dtype if residual is None else residual.dtype, device=x.device)
    if not rows:
        return out
    block = triton.next_power_of_2(size)
    rows_per_program = max(1, _TILE_ELEMENTS // block)
    _norm_kernel[(triton.cdiv(rows, rows_per_program),)](
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        rows,
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=rows_per_program,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        CENTERED=centered,
        num_warps=4 if block < 4096 else 8 if block <= 8192 else 16,
        **overlapping(x),
    )
    return out


def _gate(op: str, x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"{op}: x must be [rows, 2 * size], got {tuple(x.shape)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows and size:
        block = min(1024, triton.next_power_of_2(size))
        _gate_kernel[(rows, triton.cdiv(size, block))](
            x, out, x.stride(0), size, BLOCK=block, GELU=gelu, num_warps=4, **overlapping(x)
        )
    return out
