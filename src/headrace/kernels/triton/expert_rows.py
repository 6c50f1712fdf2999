"""The experts of very few tokens, in Triton: each pair of a token and an expert reads its weights where they lie.

Owns the two products of a mixture when sorting pairs by expert would gain nothing: two launches instead of five. Does not own products of more
pairs (`matmul`). As in `one_row`, each lane adds up its own elements of k in float32, in order, and the lanes are summed at the end.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.experts import PackedExperts
from headrace.kernels.triton.launch import overlaps, wait_for_previous
from headrace.kernels.triton.rows import activate

MOST_PAIRS = 16

_UP_COLUMNS = 8
_DOWN_COLUMNS = 1
_INNER = 256


@triton.jit
def _expert_up_kernel(
    x_ptr,
    table_ptr,
    ids_ptr,
    y_ptr,
    n,
    k,
    x_stride,
    TOP_K: tl.constexpr,
    GELU: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """activation(gate @ x) * (up @ x) of one pair -> y[pair, n]."""
    wait_for_previous(OVERLAPS)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + pair)
    if expert < 0:
        return
    element: tl.constexpr = x_ptr.dtype.element_ty
    weight_ptr = tl.multiple_of(tl.load(table_ptr + expert * 2).to(tl.pointer_type(element)), 16)
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
    """y[token, n] = sum over ranks of share * (down @ x[pair]). The rows of a tile are ranks times columns."""
    wait_for_previous(OVERLAPS)
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
    acc = tl.zeros((BLOCK_K * COLUMNS, INNER), tl.float32)
    for begin in tl.range(0, k, INNER, num_stages=4):
        inside = there[:, None] & (inner < k - begin)[None, :]
        w = tl.load(places + begin, mask=inside, other=0.0)
        acc += w.to(tl.float32) * tl.load(x_places + begin, mask=inside, other=0.0).to(tl.float32)
    # A pair's output is rounded before it is weighed, as where the two are separate operations.
    sums = tl.sum(acc, 1).to(element).to(tl.float32)
    shares = tl.load(shares_ptr + token * TOP_K + rank, mask=there, other=0.0)
    y = tl.sum(tl.reshape(sums * shares, (BLOCK_K, COLUMNS)), 0)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(y_ptr + token * n + columns, y.to(element), mask=columns < n)


def few_pairs_moe(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    """See `headrace.kernels.ops.moe`, for weights of the dtype of x without biases."""
    rows, top_k = ids.shape
    hidden, intermediate = experts.hidden_size, experts.intermediate_size
    gated = torch.empty(rows * top_k, intermediate, dtype=x.dtype, device=x.device)
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    ids, overlap = ids.contiguous(), overlaps(x)
    _expert_up_kernel[(rows * top_k, triton.cdiv(intermediate, _UP_COLUMNS))](
        x,
        experts.table,
        ids,
        gated,
        intermediate,
        hidden,
        x.stride(0),
        TOP_K=top_k,
        GELU=experts.activation == "gelu_tanh",
        COLUMNS=_UP_COLUMNS,
        INNER=_INNER,
        OVERLAPS=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    _expert_down_kernel[(triton.cdiv(hidden, _DOWN_COLUMNS), rows)](
        gated,
        experts.table,
        ids,
        shares.float().contiguous(),
        out,
        hidden,
        intermediate,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        COLUMNS=_DOWN_COLUMNS,
        INNER=_INNER,
        OVERLAPS=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out
