"""Matrix products in Triton: the experts of a mixture as one grouped product, and a batch-invariant linear layer.

Does not own a plain linear layer: the vendor's library is faster. It picks its tiles and splits by the number of rows, though, and with them the
order of a sum; `invariant_linear` always computes in one shape, for when bits must not depend on the batch. Sources: Triton's tutorials
"Matrix Multiplication" and "Group GEMM"; the grouping of tokens by expert is that of MegaBlocks (T. Gale et al., 2023) without its
sparse formats.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels import torch_fallback
from headrace.kernels.experts import PackedExperts
from headrace.kernels.packing import PackedLinear
from headrace.kernels.triton.expert_rows import MOST_PAIRS, few_pairs_moe
from headrace.kernels.triton.launch import is_hopper
from headrace.kernels.triton.routing import order_by_expert
from headrace.kernels.triton.rows import activate


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


_INVARIANT = Tile(64, 64, 64, 4, 4)
_INVARIANT_LINEAR = ((64, Tile(64, 32, 128, 4, 4)), (256, Tile(64, 128, 64, 4, 4)))
_INVARIANT_LINEAR_MANY = Tile(128, 128, 64, 8, 3)
_INVARIANT_LINEAR_HOPPER = Tile(256, 128, 64, 8, 3)
_PANEL = 8
SMALL = Tile(16, 64, 128, 4, 3)
LARGE = Tile(128, 64, 64, 8, 3)
"""_INVARIANT_LINEAR: by most rows. In all of these an element is one chain of products of 16 elements of k, in order, whatever the tile:
its bits are the same. _PANEL: tiles of rows whose programs run side by side, so that they share columns of the weight in the cache."""


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rows,
    n,
    k,
    x_stride,
    y_stride,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PANEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Programs in the order of panels: PANEL tiles of rows for one tile of columns, then for the next.
    num_m = tl.cdiv(rows, BLOCK_M)
    num_n = tl.cdiv(n, BLOCK_N)
    panel = tl.program_id(0) // (PANEL * num_n)
    in_panel = tl.program_id(0) % (PANEL * num_n)
    height = tl.minimum(num_m - panel * PANEL, PANEL)
    m = ((panel * PANEL + in_panel % height) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = in_panel // height * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_places = x_ptr + m[:, None] * x_stride + inner[None, :]
    w_places = weight_ptr + columns[None, :].to(tl.int64) * k + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_places + begin, mask=(m < rows)[:, None], other=0.0)
            w = tl.load(w_places + begin, mask=(columns < n)[None, :], other=0.0)
        else:
            left = inner < k - begin
            x = tl.load(x_places + begin, mask=(m < rows)[:, None] & left[None, :], other=0.0)
            w = tl.load(w_places + begin, mask=(columns < n)[None, :] & left[:, None], other=0.0)
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    places = y_ptr + m[:, None] * y_stride + columns[None, :]
    inside = (m < rows)[:, None] & (columns < n)[None, :]
    if ACCUMULATE:
        acc += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _described_linear_kernel(
    x, weight, bias_ptr, y_ptr, rows, n, k, y_stride,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """`_linear_kernel` with tiles that Hopper's copy engine brings: the same products in the same order, with the same bits."""
    num_m = tl.cdiv(rows, BLOCK_M)
    num_n = tl.cdiv(n, BLOCK_N)
    panel = tl.program_id(0) // (PANEL * num_n)
    in_panel = tl.program_id(0) % (PANEL * num_n)
    height = tl.minimum(num_m - panel * PANEL, PANEL)
    first_m = (panel * PANEL + in_panel % height) * BLOCK_M
    first_n = in_panel // height * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, k, BLOCK_K):
        acc = tl.dot(x.load([first_m, begin]), weight.load([first_n, begin]).T, acc)
    m = (first_m + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = first_n + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    places = y_ptr + m[:, None] * y_stride + columns[None, :]
    inside = (m < rows)[:, None] & (columns < n)[None, :]
    if ACCUMULATE:
        acc += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _expert_tile(ends_ptr, num_experts, tile, BLOCK_M: tl.constexpr):
    """(expert, begin, end) of a tile of the rows sorted by expert; begin >= end when the tile has none.

    Expert e begins at tile begin(e) // BLOCK_M + e at the latest: the last one that begins at or before `tile` has it.
    """
    low = 0
    high = num_experts
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(ends_ptr + middle) // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    begin = tl.load(ends_ptr + low)
    end = tl.load(ends_ptr + low + 1)
    return low, begin + (tile - begin // BLOCK_M - low) * BLOCK_M, end


@triton.jit(do_not_specialize=["num_experts", "pairs_per_row"])
def _expert_kernel(
    x_ptr,
    table_ptr,
    order_ptr,
    ends_ptr,
    y_ptr,
    num_experts,
    pairs_per_row,
    n,
    k,
    x_stride,
    IS_GATED: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of pairs (token, expert) times its expert's weight.

    IS_GATED: x rows by token -> activation(gate) * up [pairs, n], in the order of experts. Else: x rows in that order -> [pairs, n], by pair.
    """
    expert, begin, end = _expert_tile(ends_ptr, num_experts, tl.program_id(0), BLOCK_M)
    if begin >= end:
        return
    element: tl.constexpr = x_ptr.dtype.element_ty
    address = tl.load(table_ptr + expert * 2 + (0 if IS_GATED else 1))
    weight_ptr = tl.multiple_of(address.to(tl.pointer_type(element)), 16)
    places = begin + tl.arange(0, BLOCK_M)
    in_expert = places < end
    pairs = tl.load(order_ptr + places, mask=in_expert, other=0)
    if IS_GATED:
        x_rows = pairs // pairs_per_row
        y_rows = places.to(tl.int64)
    else:
        x_rows = places.to(tl.int64)
        y_rows = pairs
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_places = x_ptr + x_rows[:, None] * x_stride + inner[None, :]
    w_places = weight_ptr + columns[None, :].to(tl.int64) * k + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_offset = n.to(tl.int64) * k
    for first in range(0, k, BLOCK_K):
        x = tl.load(x_places + first, mask=in_expert[:, None] & (inner < k - first)[None, :], other=0.0)
        w_inside = (columns < n)[None, :] & (inner < k - first)[:, None]
        acc = tl.dot(x, tl.load(w_places + first, mask=w_inside, other=0.0), acc, input_precision=PRECISION)
        if IS_GATED:
            w = tl.load(w_places + (up_offset + first), mask=w_inside, other=0.0)
            up = tl.dot(x, w, up, input_precision=PRECISION)
    if IS_GATED:
        acc = activate(acc, GELU) * up
    inside = in_expert[:, None] & (columns < n)[None, :]
    tl.store(y_ptr + y_rows[:, None] * n + columns[None, :], acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_ranks_kernel(pairs_ptr, experts_ptr, shares_ptr, out_ptr, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = sum over ranks, in order, of share * pair, in float32. A pair whose expert is -1 was not computed and adds nothing."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for rank in range(TOP_K):
        pair = row * TOP_K + rank
        share = tl.load(shares_ptr + pair)
        inside = (columns < size) & (tl.load(experts_ptr + pair) >= 0)
        acc += share * tl.load(pairs_ptr + pair * size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < size)


def invariant_linear(
    x: torch.Tensor, packed: PackedLinear, out: torch.Tensor | None, accumulate: bool, tile: Tile | None = None
) -> torch.Tensor:
    """See `headrace.kernels.ops.linear`; the bits of a row depend on that row alone. Quantised weights are left to torch."""
    if packed.layout != "torch" or x.dim() != 2 or x.shape[1] != packed.k or x.stride(1) != 1:
        return torch_fallback.linear(x, packed, out, accumulate)
    if accumulate and out is None:
        raise ValueError("linear: accumulate needs out")
    rows = x.shape[0]
    if out is None:
        out = torch.empty(rows, packed.n, dtype=x.dtype, device=x.device)
    elif tuple(out.shape) != (rows, packed.n):
        raise ValueError(f"linear: out must be {(rows, packed.n)}, got {tuple(out.shape)}")
    if not rows:
        return out
    described = tile is None and rows > _INVARIANT_LINEAR[-1][0] and is_hopper(x) and _has_descriptors(x, packed)
    if described:
        described_linear(x, packed, out, accumulate)
    else:
        tile = tile or _invariant_tile(x)
        _linear_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(packed.n, tile.columns),)](
            x,
            packed.data,
            packed.data if packed.bias is None else packed.bias,
            out,
            rows,
            packed.n,
            packed.k,
            x.stride(0),
            out.stride(0),
            HAS_BIAS=packed.bias is not None,
            ACCUMULATE=accumulate,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.inner,
            EVEN_K=packed.k % tile.inner == 0,
            PANEL=_PANEL,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out


def _has_descriptors(x: torch.Tensor, packed: PackedLinear) -> bool:
    """Whether the copy engine takes both: rows that begin at multiples of 16 bytes."""
    return (
        x.dtype == packed.data.dtype
        and x.element_size() == 2
        and x.stride(0) % 8 == packed.k % 8 == x.data_ptr() % 16 == 0
    )


def described_linear(
    x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, accumulate: bool, tile: Tile = _INVARIANT_LINEAR_HOPPER
) -> None:
    """`invariant_linear` of many rows on Hopper."""
    rows, n, k = len(x), packed.n, packed.k
    _described_linear_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns),)](
        TensorDescriptor(x, [rows, k], [x.stride(0), 1], [tile.rows, tile.inner]),
        TensorDescriptor(packed.data, [n, k], [k, 1], [tile.columns, tile.inner]),
        packed.data if packed.bias is None else packed.bias,
        out,
        rows,
        n,
        k,
        out.stride(0),
        HAS_BIAS=packed.bias is not None,
        ACCUMULATE=accumulate,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        PANEL=_PANEL,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _invariant_tile(x: torch.Tensor) -> Tile:
    if x.element_size() > 2:
        return _INVARIANT
    return next((tile for most, tile in _INVARIANT_LINEAR if len(x) <= most), _INVARIANT_LINEAR_MANY)


def moe(x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    """See `headrace.kernels.ops.moe`. Without biases and with weights of x's dtype; other experts are left to torch."""
    if not _reads(experts, x):
        return torch_fallback.moe(x, expert_ids, shares, experts)
    if 0 < expert_ids.numel() <= MOST_PAIRS and x.stride(1) == 1:
        return few_pairs_moe(x, expert_ids, shares, experts)
    small = expert_ids.numel() < 32 * len(experts.gate_up)
    return moe_in_tiles(x, expert_ids, shares, experts, SMALL if small else LARGE)


def _reads(experts: PackedExperts, x: torch.Tensor) -> bool:
    weights = (*experts.gate_up, *experts.down)
    return experts.table is not None and all(w.bias is None and w.data.dtype == x.dtype for w in weights)


def invariant_moe(
    x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor, experts: PackedExperts
) -> torch.Tensor:
    """`moe` in one shape of tiles whatever the batch: the bits of a row depend on that row alone."""
    if not _reads(experts, x):
        return torch_fallback.moe(x, expert_ids, shares, experts)
    return moe_in_tiles(x, expert_ids, shares, experts, _INVARIANT)


def moe_in_tiles(
    x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor, experts: PackedExperts, tile: Tile
) -> torch.Tensor:
    """`moe` in tiles of this shape, of experts that Triton reads."""
    rows, top_k = expert_ids.shape
    hidden, intermediate = experts.hidden_size, experts.intermediate_size
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    num_experts, num_pairs = len(experts.gate_up), rows * top_k
    order, ends = order_by_expert(expert_ids.reshape(-1), num_experts)
    # Each expert that has any rows may leave one tile partly filled.
    most_tiles = num_pairs // tile.rows + num_experts
    gated = torch.empty(num_pairs, intermediate, dtype=x.dtype, device=x.device)
    pairs = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    for source, target in ((x, gated), (gated, pairs)):
        n = target.shape[1]
        _expert_kernel[(most_tiles, triton.cdiv(n, tile.columns))](
            source,
            experts.table,
            order,
            ends,
            target,
            num_experts,
            top_k,
            n,
            source.shape[1],
            source.stride(0),
            IS_GATED=target is gated,
            GELU=experts.activation == "gelu_tanh",
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.inner,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_ranks_kernel[(rows, triton.cdiv(hidden, block))](
        pairs,
        expert_ids.contiguous(),
        shares.float().contiguous(),
        out,
        hidden,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
    )
    return out
