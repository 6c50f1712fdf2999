"""The parameters of the draw by sequence, as the kernel takes them, and the largest logits of a row.

Does not own the draw itself: `headrace.kernels.drawing` defines it. Used by the sampler, in a worker's thread.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels import ops
from headrace.kernels.drawing import ONE, masked
from headrace.sampling.random import uniform
from headrace.sampling.typical import ROWS_AT_ONCE, typical_logits

TEMPERATURES: Final = (1e-30, 1e30)
"""Beyond these a token is sampled in the same way (the largest ones; uniformly), and float32 would come to its end."""

_TOP_BLOCK: Final = 64

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Ints = Sequence[int] | Int32Array
MaskTensors = tuple[torch.Tensor, torch.Tensor]
"""Words and rows as in `TokenMasks`; on the device if they have been uploaded."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Checked parameters of one row. temperature > 0; top_k 0 = off; top_p 1 = off; min_p 0 = off; typical_p 1 = off."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens the rows of a step may draw. words: int32[n, V / 32 rounded up], packed bits. rows: int64[R], for each row its mask, -1 = all."""

    words: Int32Array
    rows: Int64Array

    def tensors(self) -> MaskTensors:
        """The same memory, as the kernel takes it."""
        return torch.from_numpy(self.words), torch.from_numpy(self.rows)

    def of(self, rows: Sequence[int]) -> "TokenMasks":
        """The masks of these rows of the step."""
        return TokenMasks(self.words, self.rows[rows])


class DrawTable:
    """Filters and seed of each sequence, and the draw of one id for each row of a step."""

    def __init__(self, max_seqs: int) -> None:
        self._seeds = np.zeros(max_seqs, dtype=np.uint64)
        self._temperatures = np.zeros(max_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_seqs, dtype=np.int64)
        self._top_p = np.ones(max_seqs, dtype=np.float64)
        self._min_weights = np.zeros(max_seqs, dtype=np.int64)
        self._typical_p = np.ones(max_seqs, dtype=np.float64)

    def set(self, seq: int, filters: Filters | None, seed: int) -> None:
        """Row `seq` from now on; filters None: greedy."""
        self._seeds[seq] = seed
        if filters is None:
            self._temperatures[seq] = 0.0
            return
        self._temperatures[seq] = min(max(filters.temperature, TEMPERATURES[0]), TEMPERATURES[1])
        self._top_k[seq] = filters.top_k
        self._top_p[seq] = filters.top_p
        self._min_weights[seq] = math.ceil(filters.min_p * ONE)
        self._typical_p[seq] = filters.typical_p

    def all_greedy(self, seqs: Int32Array) -> bool:
        """Whether each of these sequences takes its most likely token."""
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
