"""The parameters of the draw by sequence, as the kernel takes them, its random numbers, and what typical-p leaves of a row before it.

Does not own the draw itself: `headrace.kernels.drawing` defines it. Used by the sampler, in a worker's thread.

A random number is a pure function of (seed, position, stream), from integers on the host: it does not depend on the batch, on earlier draws, on
retraction or on the device.

Locally typical sampling (Meister et al., "Locally Typical Sampling", 2022) keeps the tokens of a row that are as surprising as the row expects. The
surprise of a token is -log p, and its mean over the row is the entropy. Kept are, by (how far the surprise is from the entropy ascending, id
ascending), the tokens whose predecessors weigh less than typical_p of the total. With d = logit - peak, -log p = log Z - d, so the distance from the
entropy is |d - mean d|: no logarithm is needed. Weights are the integers of `headrace.kernels.drawing`, and what is summed are integers, so the kept
set does not depend on the batch, the threads or the device. A token whose weight is zero is not kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels import ops
from headrace.kernels.drawing import ONE, masked, weights_of
from headrace.sampling.params import ResolvedSamplingParams

TEMPERATURES: Final = (1e-30, 1e30)
"""Beyond these a token is sampled in the same way (the largest ones; uniformly), and float32 would come to its end."""

ROWS_AT_ONCE: Final = 4
"""Rows for one call on a device: each takes some 80 bytes for each id meanwhile."""

_MULTIPLIERS: Final = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL: Final = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW32: Final = np.uint64(0xFFFFFFFF)
_SHIFT32: Final = np.uint64(32)
_ROUNDS: Final = 10

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Ints = Sequence[int] | Int32Array
MaskTensors = tuple[torch.Tensor, torch.Tensor]
"""Words and rows as in `TokenMasks`; on the device if they have been uploaded."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens the rows of a step may draw. words: int32[n, V / 32 rounded up], packed bits. rows: int64[R], for each row its mask, -1 = all."""

    words: Int32Array
    rows: Int64Array

    def tensors(self) -> MaskTensors:
        """The same memory, as the kernel takes it."""
        return torch.from_numpy(self.words), torch.from_numpy(self.rows)

    def of(self, rows: Sequence[int]) -> "TokenMasks":
        return TokenMasks(self.words, self.rows[rows])


class DrawTable:
    """What each sequence is drawn by, and the draw of one id for each row of a step."""

    def __init__(self, max_seqs: int) -> None:
        self._seeds = np.zeros(max_seqs, dtype=np.uint64)
        self._temperatures = np.zeros(max_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_seqs, dtype=np.int64)
        self._top_p = np.ones(max_seqs, dtype=np.float64)
        self._min_weights = np.zeros(max_seqs, dtype=np.int64)
        self._typical_p = np.ones(max_seqs, dtype=np.float64)

    def set(self, seq: int, params: ResolvedSamplingParams) -> None:
        """Row `seq` from now on."""
        self._seeds[seq] = params.seed
        if params.is_greedy:
            self._temperatures[seq] = 0.0
            return
        self._temperatures[seq] = min(max(params.temperature, TEMPERATURES[0]), TEMPERATURES[1])
        self._top_k[seq] = max(params.top_k, 0)
        self._top_p[seq] = params.top_p
        self._min_weights[seq] = math.ceil(params.min_p * ONE)
        self._typical_p[seq] = params.typical_p

    def all_greedy(self, seqs: Int32Array) -> bool:
        return not self._temperatures[seqs].any()

    def draw(
        self,
        logits: torch.Tensor,
        seqs: Ints,
        positions: Ints,
        rows: Ints,
        masks: TokenMasks | MaskTensors | None = None,
    ) -> torch.Tensor:
        """int64[R] on the device of float32[R, V] logits: an id for each of `rows`, -1 for the others.

        Row r is of sequence seqs[r]; positions: index that its token will have. -1, too, for a row with NaN or no finite largest logit
        among the tokens that its mask allows.
        """
        index = np.array(seqs)
        temperatures = self._temperatures[index]
        if len(rows) < len(index):
            unwanted = np.ones(len(index), dtype=np.bool_)
            unwanted[rows] = False
            temperatures[unwanted] = -1.0
        u = np.zeros(len(index))
        drawn = np.flatnonzero(temperatures > 0.0)
        if len(drawn):
            u[drawn] = uniform(self._seeds[index[drawn]], np.array(positions)[drawn])
        parameters = (temperatures, self._top_k[index], self._top_p[index], self._min_weights[index], u)
        own = masks.tensors() if isinstance(masks, TokenMasks) else masks or ()
        typical = drawn[self._typical_p[index[drawn]] < 1.0]
        if len(typical):
            logits = self._only_typical(logits, index, typical, own)
        return ops.draw(logits, *(torch.from_numpy(values) for values in parameters), *own)

    def _only_typical(
        self, logits: torch.Tensor, index: npt.NDArray[np.integer], rows: Int64Array, masks: MaskTensors | tuple[()]
    ) -> torch.Tensor:
        """A copy of `logits` with -inf for the tokens of `rows` that are not typical of what their masks allow. index: the sequence of each row."""
        logits = logits.clone()
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[start : start + ROWS_AT_ONCE]
            at = torch.from_numpy(part).to(logits.device, non_blocking=True)
            own = logits.index_select(0, at)
            if masks:
                words, mask_rows = masks
                own = masked(own, words, mask_rows.index_select(0, at.to(mask_rows.device)))
            seqs = index[part]
            own = typical_logits(own, torch.from_numpy(self._top_k[seqs]), torch.from_numpy(self._typical_p[seqs]))
            logits.index_copy_(0, at, own)
        return logits


def greedy_ids(logits: torch.Tensor) -> torch.Tensor:
    """int64[R] on the device of float32[R, V] logits: the most likely id, -1 in rows with NaN or without a finite largest logit. Does not
    wait for the device."""
    ids = ops.argmax(logits)
    peaks = logits.gather(1, ids.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where((ids >= 0) & peaks.isfinite(), ids, -1)


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


def philox4x32(counter: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

    counter: uint64[4, n] and key: uint64[2, n], each value a 32-bit word. Returns uint64[4, n], 32-bit words.
    """
    even, odd = counter[[0, 2]], counter[[1, 3]]
    for _ in range(_ROUNDS):
        product = _MULTIPLIERS * even
        even = (product[::-1] >> _SHIFT32) ^ odd ^ key
        odd = product[::-1] & _LOW32
        key = (key + _WEYL) & _LOW32
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform(
    seeds: Sequence[int] | UInt64Array, positions: Sequence[int] | Int64Array, stream: int = 0
) -> npt.NDArray[np.float64]:
    """float64[n] in [0, 1), 53 random bits each: one number for each pair (seed, position).

    seeds: in [0, 2**64). positions: index that the sampled token will have, in [0, 2**64).
    stream: in [0, 2**32); different streams give independent numbers for the same pair.
    """
    seed, position = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    counter = np.stack(
        (position & _LOW32, position >> _SHIFT32, np.full_like(position, stream), np.zeros_like(position))
    )
    words = philox4x32(counter, np.stack((seed & _LOW32, seed >> _SHIFT32)))
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    numbers: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
