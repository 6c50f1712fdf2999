"""Locally typical sampling (Meister et al., "Locally Typical Sampling", 2022): which tokens of a row are as surprising as the row expects.

Owns the definition, in torch for any device and in numpy for the CPU, with the same result. It is applied to logits before the draw. Used by
`draw.DrawTable`, in a worker's thread.

The surprise of a token is -log p, and its mean over the row is the entropy. Kept are, by (how far the surprise is from the entropy ascending, id
ascending), the tokens whose predecessors weigh less than typical_p of the total. With d = logit - peak, -log p = log Z - d, so the distance from the
entropy is |d - mean d|: no logarithm is needed. Weights are the integers of `headrace.kernels.drawing`, and what is summed are integers, so the kept
set does not depend on the batch, the threads or the device. A token whose weight is zero is not kept.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.drawing import weights_of

ROWS_AT_ONCE: Final = 4
"""Rows for one call on a device: each takes some 80 bytes for each id meanwhile."""

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


def typical_logits(logits: torch.Tensor, top_k: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """float32[R, V]: `logits` where a token is kept, -inf elsewhere. Rows with NaN or without a finite largest logit stay as they are.

    top_k: int64[R], 0 = off: only these tokens are looked at. typical_p: float64[R], in (0, 1]. Both on the CPU. Does not wait for the device.
    """
    if logits.device.type == "cpu":
        rows = zip(logits.numpy(), top_k.tolist(), typical_p.tolist(), strict=True)
        return torch.from_numpy(np.stack([_typical_row(*row) for row in rows]))
    return typical_rows(logits, top_k, typical_p)


def typical_rows(logits: torch.Tensor, top_k: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """See `typical_logits`. Sorts whole rows, on any device."""
    device, size = logits.device, logits.shape[1]
    peaks = logits.amax(dim=1, keepdim=True)
    weights = weights_of(logits, peaks, torch.ones_like(peaks))
    if bool(((top_k > 0) & (top_k < size)).any()):
        order = torch.sort(logits, dim=1, descending=True, stable=True).indices
        most = torch.where(top_k > 0, top_k, size).to(device, non_blocking=True).unsqueeze(1)
        ranked = weights.gather(1, order).masked_fill_(torch.arange(size, device=device).unsqueeze(0) >= most, 0)
        weights = torch.zeros_like(weights).scatter_(1, order, ranked)
    is_out = weights == 0
    distances = logits.double() - peaks.double()
    # At most 2^40 / e each, so that 2^22 of them do not overflow.
    sums = (weights.double() * distances).masked_fill_(is_out, 0.0).to(torch.int64).sum(dim=1, keepdim=True)
    total = weights.sum(dim=1, keepdim=True).double()
    distances.sub_(sums.double() / total).abs_().masked_fill_(is_out, torch.inf)
    order = torch.sort(distances, dim=1, stable=True).indices
    ranked = weights.gather(1, order)
    limit = typical_p.to(device, non_blocking=True).unsqueeze(1) * total
    dropped = ((ranked.cumsum(dim=1) - ranked).double() >= limit) | (ranked == 0)
    kept = logits.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), -torch.inf)
    return torch.where(peaks.isfinite(), kept, logits)


def _typical_row(logits: Float32Array, top_k: int, typical_p: float) -> Float32Array:
    """A row of `typical_rows`, without a sort by value and id: equal values matter at the edge alone."""
    peak = logits.max()
    if not np.isfinite(peak):
        return logits
    ids = _largest_ids(logits, top_k) if 0 < top_k < len(logits) else np.flatnonzero(logits > -np.inf)
    tensors = torch.from_numpy(logits[ids])[None], torch.from_numpy(peak.reshape(1, 1)), torch.ones(1, 1)
    weights = weights_of(*tensors)[0].numpy()
    ids, weights = ids[weights > 0], weights[weights > 0]
    distances = logits[ids].astype(np.float64) - np.float64(peak)
    total = float(weights.sum())
    distances = np.abs(distances - float((weights * distances).astype(np.int64).sum()) / total)
    order = np.argsort(distances)
    before = weights[order].cumsum() - weights[order]
    edge = distances[order[np.count_nonzero(before < typical_p * total) - 1]]
    inside, equal = distances < edge, np.flatnonzero(distances == edge)
    before = weights[inside].sum() + weights[equal].cumsum() - weights[equal]
    inside[equal[before < typical_p * total]] = True
    kept = np.full_like(logits, -np.inf)
    kept[ids[inside]] = logits[ids[inside]]
    return kept


def _largest_ids(logits: Float32Array, k: int) -> Int64Array:
    """The ids of the k largest values above -inf in ascending order; of equal ones the lower ids."""
    edge = np.partition(logits, len(logits) - k)[len(logits) - k]
    chosen = logits > edge
    if edge > -np.inf:
        chosen[np.flatnonzero(logits == edge)[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)
