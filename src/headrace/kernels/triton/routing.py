"""The routing of a mixture of experts in Triton: which experts a token is given to, and the pairs of tokens and experts in the order of experts.

In torch this takes some fifteen launches a layer, which is longer than the experts of a few tokens take. Nothing here waits for the device.
"""

import torch
import triton
import triton.language as tl

_MOST_PAIRS = 2048
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
):
    """One row: softmax over all experts, the best of them, of equal ones the first."""
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    ranks = tl.arange(0, BLOCK_K)
    logits = tl.load(logits_ptr + row * stride + experts, mask=experts < num_experts, other=float("-inf")).to(
        tl.float32
    )
    weights = tl.exp(logits - tl.max(logits, 0))
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


def route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `headrace.kernels.ops.route`."""
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
        )
    return shares, ids


def order_by_expert(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64[num_pairs], -1 = of no expert here -> (order int64[num_pairs], begins int64[num_experts + 2]).

    order: the pairs sorted by expert, stable; those of none last. begins: of expert e, where its pairs begin in that order; those of
    num_experts are of none.
    """
    num_pairs = ids.numel()
    if num_pairs > _MOST_PAIRS:
        ids = ids.masked_fill(ids < 0, num_experts)
        begins = torch.zeros(num_experts + 2, dtype=torch.int64, device=ids.device)
        begins.scatter_add_(0, ids + 1, torch.ones_like(ids))
        return torch.argsort(ids, stable=True), begins.cumsum(0)
    order = torch.empty(num_pairs, dtype=torch.int64, device=ids.device)
    begins = torch.empty(num_experts + 2, dtype=torch.int64, device=ids.device)
    programs = triton.cdiv(max(num_pairs, num_experts + 2), _PAIRS)
    _order_kernel[(programs,)](ids, order, begins, num_pairs, num_experts, PAIRS=_PAIRS, CHUNK=_CHUNK, num_warps=4)
    return order, begins
