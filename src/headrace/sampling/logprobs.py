"""Logprobs of sampled and prompt tokens.

Owns the numbers of a `LogprobBlock`. They are the log-softmax of the model's unmodified logits: before custom processors, bias,
penalties, masks and temperature. Does not choose positions: the runner does. Runs in a worker's thread.

Each row is reduced alone, by integer sums (see `kernels.drawing`), so a value is bitwise the same in any batch, chunk or number of threads.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels import ops
from headrace.kernels.drawing import ONE
from headrace.messages.outputs import LogprobBlock
from headrace.messages.requests import LogprobSpec

_TOP_BLOCK: Final = 64

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


def log_sum_exp(logits: torch.Tensor) -> list[float]:
    """log(sum(exp(row))) of each row of float32[n, V]; NaN when it has a NaN or no finite maximum."""
    peaks, sums = ops.exp_sums(logits)
    return [
        peak + math.log(weight / ONE) if math.isfinite(peak) else math.nan
        for peak, weight in zip(peaks.tolist(), sums.tolist(), strict=True)
    ]


def prompt_logprobs(logits: torch.Tensor, next_ids: npt.ArrayLike, spec: LogprobSpec) -> LogprobBlock:
    """The block of `next_ids` int[n], where logits float32[n, V] row i is the prediction of next_ids[i].

    Alternatives are ordered by (logit descending, id ascending). If `top_num` exceeds the vocabulary, the rest has id -1 and
    NaN; an id outside the vocabulary has the logprob NaN. A row with NaN logits gives NaN.
    """
    ids = np.asarray(next_ids, dtype=np.int32)
    num_rows, size = logits.shape
    wanted = np.concatenate(
        (ids[:, None], np.broadcast_to(np.array(spec.token_ids, dtype=np.int64), (num_rows, len(spec.token_ids)))),
        axis=1,
    )
    values = np.full(wanted.shape, np.nan, dtype=np.float32)
    top_ids = np.full((num_rows, spec.top_num), -1, dtype=np.int32)
    top_values = np.full((num_rows, spec.top_num), np.nan, dtype=np.float32)
    for i, total in enumerate(log_sum_exp(logits)):
        if math.isnan(total):
            continue
        host: Float32Array = logits[i].detach().cpu().numpy()
        inside = (wanted[i] >= 0) & (wanted[i] < size)
        values[i, inside] = _log_softmax(host[wanted[i, inside]], total)
        if spec.top_num:
            top = largest(host, min(spec.top_num, size))
            # Then impossible ones (-inf) by id.
            top = np.concatenate((top, np.flatnonzero(np.isneginf(host))[: min(spec.top_num, size) - len(top)]))
            top_ids[i, : len(top)] = top
            top_values[i, : len(top)] = _log_softmax(host[top], total)
    return LogprobBlock(
        token_ids=ids.astype("<i4").tobytes(),
        values=values[:, 0].astype("<f4").tobytes(),
        top_ids=top_ids.astype("<i4").tobytes(),
        top_values=top_values.astype("<f4").tobytes(),
        picked=values[:, 1:].astype("<f4").tobytes(),
    )


def has_bad_logits(block: LogprobBlock, vocab_size: int) -> bool:
    """Whether a row of logits had a NaN or no finite maximum. Ids outside the vocabulary, as media have, do not tell."""
    ids, values = np.frombuffer(block.token_ids, "<i4"), np.frombuffer(block.values, "<f4")
    return bool(np.isnan(values[(ids >= 0) & (ids < vocab_size)]).any())


def token_logprobs(row: torch.Tensor, token_id: int, spec: LogprobSpec) -> LogprobBlock:
    """The block of one sampled token; row: float32[V], the model's logits."""
    return prompt_logprobs(row.unsqueeze(0), [token_id], spec)


def _log_softmax(logits: Float32Array, total: float) -> Float32Array:
    return (logits.astype(np.float64) - total).astype(np.float32)


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
