"""Mixtures of experts in Triton: the routing, which experts a token is given to; their products as one grouped product, or pair by pair for very
few tokens, where sorting pairs of a token and an expert would gain nothing: two launches instead of five.

In torch the routing takes some fifteen launches a layer, which is longer than the experts of a few tokens take. Nothing here waits for the device.
Sources: Triton's tutorial "Group GEMM"; the grouping of tokens by expert is that of MegaBlocks (T. Gale et al., 2023) without its sparse formats.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels import torch_fallback
from headrace.kernels.packing import PackedExperts
from headrace.kernels.triton.launch import Tile, overlapping, precision, wait_for_previous
from headrace.kernels.triton.rows import activate

SMALL = Tile(16, 64, 128, 4, 3)
LARGE = Tile(128, 64, 64, 8, 3)
_INVARIANT = Tile(64, 64, 64, 4, 4)

MOST_PAIRS = 16
"""With more pairs of a token and an expert, they are sorted."""

_UP_COLUMNS = 8
_DOWN_COLUMNS = 1
_INNER = 256

_MOST_COMPARED_PAIRS = 2048
"""With more, a sort is faster than comparing every pair with every other."""

_PAIRS = 32
_CHUNK = 64


@triton.jit
def _route_kernel(
    logits_ptr,
    ids_ptr,
    shares_ptr,
    num_experts,
    stride,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One row: softmax over all experts, the best of them, of equal ones the first. What is not a number is chosen last."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    ranks = tl.arange(0, BLOCK_K)
    logits = tl.load(logits_ptr + row * stride + experts, mask=experts < num_experts, other=float("-inf")).to(
        tl.float32
    )
    weights = tl.exp(logits - tl.max(logits, 0))
    weights = tl.where(weights == weights, weights, 0.0)
    total = tl.sum(weights, 0)
    left = tl.where(experts < num_experts, weights, -1.0)
    best = tl.zeros((BLOCK_K,), tl.float32)
    ids = tl.zeros((BLOCK_K,), tl.int64)
    for rank in range(TOP_K):
        top = tl.max(left, 0)
        chosen = tl.min(tl.where(left == top, experts, BLOCK), 0)
        best = tl.where(ranks == rank, top, best)
        ids = tl.where(ranks == rank, chosen.to(tl.int64), ids)
        left = tl.where(experts == chosen, -1.0, left)
    shares = best / (tl.sum(best, 0) if RENORMALISE else total)
    tl.store(ids_ptr + row * TOP_K + ranks, ids, mask=ranks < TOP_K)
    tl.store(shares_ptr + row * TOP_K + ranks, shares, mask=ranks < TOP_K)


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _order_kernel(ids_ptr, order_ptr, ends_ptr, num_pairs, num_experts, PAIRS: tl.constexpr, CHUNK: tl.constexpr):
    """Places of PAIRS pairs among all in the order of experts, and where as many experts end. An id below 0 comes after all experts."""
    own = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    ids = tl.load(ids_ptr + own, mask=own < num_pairs, other=0)
    ids = tl.where(ids < 0, num_experts, ids)
    places = tl.zeros((PAIRS,), tl.int64)
    below = tl.zeros((PAIRS,), tl.int64)
    for begin in range(0, num_pairs, CHUNK):
        others = begin + tl.arange(0, CHUNK)
        there = others < num_pairs
        other_ids = tl.load(ids_ptr + others, mask=there, other=0)
        other_ids = tl.where(other_ids < 0, num_experts, other_ids)
        before = (other_ids[None, :] < ids[:, None]) | (
            (other_ids[None, :] == ids[:, None]) & (others[None, :] < own[:, None])
        )
        places += tl.sum((before & there[None, :]).to(tl.int64), 1)
        below += tl.sum(((other_ids[None, :] < own[:, None]) & there[None, :]).to(tl.int64), 1)
    tl.store(order_ptr + places, own.to(tl.int64), mask=own < num_pairs)
    tl.store(ends_ptr + own, below, mask=own <= num_experts + 1)


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


@triton.jit(do_not_specialize=["num_experts"])
def _expert_up_kernel(
    x_ptr,
    table_ptr,
    ids_ptr,
    y_ptr,
    num_experts,
    n,
    k,
    x_stride,
    TOP_K: tl.constexpr,
    GELU: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """activation(gate @ x) * (up @ x) of one pair -> y[pair, n]. Addresses are read before it is known whose are needed."""
    numbers = tl.arange(0, BLOCK)
    addresses = tl.load(table_ptr + numbers * 2, mask=numbers < num_experts, other=0)
    wait_for_previous(OVERLAPS)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + pair)
    if expert < 0:
        return
    element: tl.constexpr = x_ptr.dtype.element_ty
    address = tl.sum(tl.where(numbers == expert, addresses, 0), 0)
    weight_ptr = tl.multiple_of(address.to(tl.pointer_type(element)), 16)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    in_n = (columns < n)[:, None]
    places = weight_ptr + columns[:, None].to(tl.int64) * k + inner[None, :]
    up_offset = n.to(tl.int64) * k
    x_row = x_ptr + pair // TOP_K * x_stride
    gate = tl.zeros((COLUMNS, INNER), tl.float32)
    up = tl.zeros((COLUMNS, INNER), tl.float32)
    for begin in tl.range(0, k, INNER, num_stages=4):
        inside = in_n & (inner < k - begin)[None, :]
        x = tl.load(x_row + begin + inner, mask=inner < k - begin, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(places + begin, mask=inside, other=0.0).to(tl.float32) * x
        up += tl.load(places + (up_offset + begin), mask=inside, other=0.0).to(tl.float32) * x
    y = activate(tl.sum(gate, 1), GELU) * tl.sum(up, 1)
    tl.store(y_ptr + pair * n + columns, y.to(element), mask=columns < n)


@triton.jit
def _expert_down_kernel(
    x_ptr,
    table_ptr,
    ids_ptr,
    shares_ptr,
    y_ptr,
    n,
    k,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """y[token, n] = sum over ranks of share * (down @ x[pair]). The rows of a tile are ranks times columns.

    The ids were there before the kernel that computes x began: the first weights are asked for while that one still runs.
    """
    token = tl.program_id(1).to(tl.int64)
    element: tl.constexpr = x_ptr.dtype.element_ty
    in_tile = tl.arange(0, BLOCK_K * COLUMNS)
    rank = in_tile // COLUMNS
    column = tl.program_id(0) * COLUMNS + in_tile % COLUMNS
    experts = tl.load(ids_ptr + token * TOP_K + rank, mask=rank < TOP_K, other=-1)
    there = (experts >= 0) & (column < n)
    addresses = tl.load(table_ptr + experts * 2 + 1, mask=there, other=0)
    weights = tl.multiple_of(addresses.to(tl.pointer_type(element)), 16)
    inner = tl.arange(0, INNER)
    places = weights[:, None] + (column.to(tl.int64) * k)[:, None] + inner[None, :]
    x_places = x_ptr + ((token * TOP_K + rank) * k)[:, None] + inner[None, :]
    inside = there[:, None] & (inner < k)[None, :]
    w = tl.load(places, mask=inside, other=0.0)
    wait_for_previous(OVERLAPS)
    acc = w.to(tl.float32) * tl.load(x_places, mask=inside, other=0.0).to(tl.float32)
    for begin in tl.range(INNER, k, INNER, num_stages=4):
        inside = there[:, None] & (inner < k - begin)[None, :]
        w = tl.load(places + begin, mask=inside, other=0.0)
        acc += w.to(tl.float32) * tl.load(x_places + begin, mask=inside, other=0.0).to(tl.float32)
    # A pair's output is rounded before it is weighed, as where the two are separate operations.
    sums = tl.sum(acc, 1).to(element).to(tl.float32)
    shares = tl.load(shares_ptr + token * TOP_K + rank, mask=there, other=0.0)
    y = tl.sum(tl.reshape(sums * shares, (BLOCK_K, COLUMNS)), 0)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(y_ptr + token * n + columns, y.to(element), mask=columns < n)


def moe(x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    """Without biases and with weights of x's dtype; other experts are left to torch."""
    if not _reads(experts, x):
        return torch_fallback.moe(x, expert_ids, shares, experts)
    if 0 < expert_ids.numel() <= MOST_PAIRS and x.stride(1) == 1:
        return _few_pairs_moe(x, expert_ids, shares, experts)
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
            PRECISION=precision(x),
            **tile.options,
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


def _few_pairs_moe(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    """Each lane adds up its own elements of k in float32, in order, and the lanes are summed at the end, as in `one_row`."""
    rows, top_k = ids.shape
    hidden, intermediate = experts.hidden_size, experts.intermediate_size
    gated = torch.empty(rows * top_k, intermediate, dtype=x.dtype, device=x.device)
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    ids, shares = ids.contiguous(), shares.float().contiguous()
    _expert_up_kernel[(rows * top_k, triton.cdiv(intermediate, _UP_COLUMNS))](
        x,
        experts.table,
        ids,
        gated,
        len(experts.gate_up),
        intermediate,
        hidden,
        x.stride(0),
        TOP_K=top_k,
        GELU=experts.activation == "gelu_tanh",
        COLUMNS=_UP_COLUMNS,
        INNER=_INNER,
        BLOCK=triton.next_power_of_2(len(experts.gate_up)),
        num_warps=4,
        **overlapping(x),
    )
    _expert_down_kernel[(triton.cdiv(hidden, _DOWN_COLUMNS), rows)](
        gated,
        experts.table,
        ids,
        shares,
        out,
        hidden,
        intermediate,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        COLUMNS=_DOWN_COLUMNS,
        INNER=_INNER,
        num_warps=4,
        **overlapping(x),
    )
    return out


def route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, num_experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    shares = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits,
            ids,
            shares,
            num_experts,
            logits.stride(0),
            TOP_K=top_k,
            BLOCK_K=triton.next_power_of_2(top_k),
            BLOCK=triton.next_power_of_2(num_experts),
            RENORMALISE=renormalise,
            num_warps=1 if num_experts <= 256 else 4,
            **overlapping(logits),
        )
    return shares, ids


def order_by_expert(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64[num_pairs], -1 = of no expert here -> (order int64[num_pairs], begins int64[num_experts + 2]).

    order: the pairs sorted by expert, stable; those of none last. begins: of expert e, where its pairs begin in that order; those of
    num_experts are of none.
    """
    num_pairs = ids.numel()
    if num_pairs > _MOST_COMPARED_PAIRS:
        ids = ids.masked_fill(ids < 0, num_experts)
        begins = torch.zeros(num_experts + 2, dtype=torch.int64, device=ids.device)
        begins.scatter_add_(0, ids + 1, torch.ones_like(ids))
        return torch.argsort(ids, stable=True), begins.cumsum(0)
    order = torch.empty(num_pairs, dtype=torch.int64, device=ids.device)
    begins = torch.empty(num_experts + 2, dtype=torch.int64, device=ids.device)
    programs = triton.cdiv(max(num_pairs, num_experts + 2), _PAIRS)
    _order_kernel[(programs,)](ids, order, begins, num_pairs, num_experts, PAIRS=_PAIRS, CHUNK=_CHUNK, num_warps=4)
    return order, begins
