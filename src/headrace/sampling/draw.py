"""From one row of logits to one id: weights, what top-k, top-p and min-p keep, and the inverse-CDF draw.

Owns the arithmetic. Does not own parameters, masks or penalties. Pure functions, run by the sampler in a worker's thread.

Weights are fixed-point integers, floor(2**40 * exp((logit - max) / temperature)). Sums of integers do not depend on their order,
so neither the batch, the number of threads nor the device's way to reduce can move a draw. A token whose weight is zero
(2**40 times less likely than the most likely one) is never drawn. Vocabularies up to 2**22 ids cannot overflow.

What is kept (S13 order, the sets are those of the usual definitions):
top-k   the k largest logits, of equal ones the lower ids
top-p   of those, in the order (value descending, id ascending), each whose predecessors weigh less than top_p of the total
        (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020)
min-p   of those, weight >= min_p * largest weight (Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024)
The draw is always over the kept ids in id order, so the ways below to find them give the same token.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

ONE: Final = 1 << 40
"""Weight of the most likely token."""

MAX_TEMPERATURE: Final = 1e30
"""Higher ones sample the same (uniformly) and would become infinite in float32."""

_BLOCK: Final = 512
_SLICE: Final = 16384
_TOP_BLOCK: Final = 64
_BUCKETS: Final = 1024
# The last bucket begins at 32 > ln(2**40): what is there weighs nothing.
_BUCKETS_PER_NAT: Final = 32.0

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Filters:
    """Checked parameters of one row. temperature > 0; top_k 0 = off; top_p 1 = off; min_p 0 = off."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def row_weights(row: Float32Array, peak: float, temperature: float) -> Int64Array:
    """int64[V] weights of one row float32[V] on the CPU; `peak` is its largest value, finite.

    numpy, slice by slice: it stays in the cache and never waits for a thread pool, where torch would meet its threads at a barrier
    after each of these short operations.
    """
    weights = np.empty(len(row), dtype=np.int64)
    scratch = np.empty(min(len(row), _SLICE), dtype=np.float32)
    divisor = np.float32(min(temperature, MAX_TEMPERATURE))
    with np.errstate(over="ignore"):
        for start in range(0, len(row), _SLICE):
            part = row[start : start + _SLICE]
            work = scratch[: len(part)]
            np.subtract(part, np.float32(peak), out=work)
            if divisor != 1.0:
                work /= divisor
            np.exp(work, out=work)
            work *= np.float32(ONE)
            weights[start : start + _SLICE] = work
    return weights


def largest(row: Float32Array, k: int) -> Int64Array:
    """Ids of the k largest values by (value descending, id ascending); fewer when fewer are above -inf.

    row: float32[V] without NaN, 1 <= k <= V. Sorts only ids that can be among them: k blocks have a maximum that is at least the
    k-th largest block maximum, so the k-th largest value is at least that.
    """
    size = len(row)
    blocks = size // _TOP_BLOCK
    if k <= blocks:
        # A block is every blocks-th value: maxima of long vectors, not of short rows.
        maxima = row[: blocks * _TOP_BLOCK].reshape(_TOP_BLOCK, blocks).max(axis=0)
        floor = np.partition(maxima, blocks - k)[blocks - k]
    else:
        floor = np.float32(-np.inf)
    ids = np.flatnonzero(row >= floor if floor != -np.inf else row > floor)
    return ids[np.argsort(-row[ids], kind="stable")[:k]]


def draw_row(row: Float32Array, peak: float, filters: Filters, u: float) -> int:
    """One id of one row on the CPU.

    row: float32[V], no NaN. peak: its largest value, finite. u: in [0, 1).
    """
    if 0 < filters.top_k < len(row):
        ranked = largest(row, filters.top_k)
        weights = row_weights(row[ranked], peak, filters.temperature)
        keep = _ranked_keep(weights, filters)
        ids, weights = ranked[keep], weights[keep]
        order = np.argsort(ids)
        return int(ids[order[_locate(weights[order], u)]])
    weights = row_weights(row, peak, filters.temperature)
    if filters.top_p < 1.0:
        weights[_outside_top_p(row, weights, peak, filters)] = 0
    if filters.min_p > 0.0:
        weights *= weights >= _min_weight(filters.min_p)
    return _locate_in_blocks(weights, u)


def draw_rows(
    logits: torch.Tensor, peak: torch.Tensor, filters: list[Filters], u: npt.NDArray[np.float64]
) -> torch.Tensor:
    """int64[n]: one id of each row, on any device, without waiting for it. Sorts whole rows when a row has top-k or top-p.

    logits: float32[n, V], no NaN (rows whose peak is not finite give any id in the vocabulary). peak: float32[n].
    """
    device, size = logits.device, logits.shape[1]

    def column(values: list[float] | npt.NDArray[np.float64], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True).unsqueeze(1)

    temperature = column([min(f.temperature, MAX_TEMPERATURE) for f in filters], torch.float32)
    weights = (logits - peak.unsqueeze(1)).div_(temperature).exp_().mul_(float(ONE)).to(torch.int64)
    if any(0 < f.top_k < size or f.top_p < 1.0 for f in filters):
        order = torch.sort(logits, dim=1, descending=True, stable=True).indices
        ranked = weights.gather(1, order)
        top_k = column([float(f.top_k or size) for f in filters], torch.float64)
        ranked.masked_fill_(torch.arange(size, device=device).unsqueeze(0) >= top_k, 0)
        total = ranked.sum(dim=1, keepdim=True).double()
        # A row without top-p keeps all: predecessors of a token that weighs something weigh less than infinity.
        top_p = column([f.top_p if f.top_p < 1.0 else np.inf for f in filters], torch.float64)
        ranked.masked_fill_((ranked.cumsum(dim=1) - ranked).double() >= top_p * total, 0)
        weights = torch.zeros_like(weights).scatter_(1, order, ranked)
    min_weight = torch.tensor([_min_weight(f.min_p) for f in filters]).to(device, non_blocking=True).unsqueeze(1)
    weights.masked_fill_(weights < min_weight, 0)

    blocks = F.pad(weights, (0, -size % _BLOCK)).view(len(filters), -1, _BLOCK)
    sums = blocks.sum(dim=2)
    ends = sums.cumsum(dim=1)
    total = ends[:, -1:]
    target = (column(u, torch.float64) * total.double()).to(torch.int64)
    target = torch.minimum(target, total - 1).clamp_(min=0)
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = ends.gather(1, block) - sums.gather(1, block)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1).cumsum(dim=1)
    offset = torch.searchsorted(inside, target - before, right=True)
    return (block * _BLOCK + offset).clamp_(max=size - 1).squeeze(1)


def _min_weight(min_p: float) -> int:
    return int(np.ceil(min_p * ONE))


def _ranked_keep(weights: Int64Array, filters: Filters) -> npt.NDArray[np.bool_]:
    """What top-p and min-p keep of weights in descending order."""
    keep = weights >= _min_weight(filters.min_p)
    if filters.top_p < 1.0:
        keep &= np.cumsum(weights) - weights < filters.top_p * float(weights.sum())
    return keep


def _outside_top_p(row: Float32Array, weights: Int64Array, peak: float, filters: Filters) -> npt.NDArray[np.bool_]:
    """bool[V]: ids that top-p drops.

    Sorts only what lies around the cut: ids are put into buckets by their distance from the peak, whole buckets are in or out,
    and one is cut.
    """
    with np.errstate(over="ignore"):
        distance = np.float32(peak) - row
        distance /= np.float32(min(filters.temperature, MAX_TEMPERATURE))
        distance *= np.float32(_BUCKETS_PER_NAT)
    bucket = np.minimum(distance, np.float32(_BUCKETS - 1), out=distance).astype(np.int64)
    # Sums of the high and low halves are exact in the float64 that bincount adds in.
    high = np.bincount(bucket, weights >> 20, _BUCKETS).astype(np.int64)
    low = np.bincount(bucket, weights & 0xFFFFF, _BUCKETS).astype(np.int64)
    sums = (high << 20) + low
    ends = np.cumsum(sums)
    limit = filters.top_p * float(ends[-1])
    # The first bucket after which no further id is kept.
    cut = int(np.searchsorted(ends.astype(np.float64), limit, side="left"))
    drop: npt.NDArray[np.bool_] = bucket > cut
    at_cut = np.flatnonzero(bucket == cut)
    ranked = at_cut[np.argsort(-row[at_cut], kind="stable")]
    ranked_weights = weights[ranked]
    before = np.cumsum(ranked_weights) - ranked_weights + (ends[cut] - sums[cut])
    drop[ranked[before >= limit]] = True
    return drop


def _target(total: int, u: float) -> int:
    return min(int(u * float(total)), total - 1)


def _locate(weights: Int64Array, u: float) -> int:
    """Index of the weight under which the fraction u of their sum falls; the sum is positive."""
    ends = np.cumsum(weights)
    return int(np.searchsorted(ends, _target(int(ends[-1]), u), side="right"))


def _locate_in_blocks(weights: Int64Array, u: float) -> int:
    """`_locate` for a whole vocabulary: sums of blocks first, then inside one block."""
    whole = len(weights) // _BLOCK * _BLOCK
    sums = weights[:whole].reshape(-1, _BLOCK).sum(axis=1)
    ends = np.append(sums, weights[whole:].sum()).cumsum()
    target = _target(int(ends[-1]), u)
    block = int(np.searchsorted(ends, target, side="right"))
    before = int(ends[block - 1]) if block else 0
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK])
    return block * _BLOCK + int(np.searchsorted(inside, target - before, side="right"))
