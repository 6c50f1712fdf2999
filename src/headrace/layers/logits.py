"""Computes logits from the last hidden state, or only the largest of them. Runs in the thread that runs the model.

For all logits, every rank sends its part of the vocabulary for each row; for the largest, two numbers.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.distributed.base import WHOLE, Shard, length
from headrace.kernels import ops
from headrace.layers.embedding import VOCABULARY_UNIT
from headrace.layers.linear import Linear
from headrace.layers.weight import Weight


class Peaks(NamedTuple):
    """The largest logit of each row. ids: int64[rows], the lowest id that has it, -1 if the row holds a NaN. values: float32[rows], then NaN."""

    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


def peaks_of(logits: torch.Tensor) -> Peaks:
    """logits: float32[rows, n >= 1] on the CPU."""
    ids = ops.argmax(logits).numpy()
    values = logits.numpy()[np.arange(len(ids)), ids]
    values[ids < 0] = np.nan
    return Peaks(ids, values)


class LogitsHead:
    """Output projection and final soft cap.

    Every rank computes the logits of some ids, soft cap included; the leader gets all, or the largest.

    soft_cap: logits become soft_cap * tanh(logits / soft_cap); 0.0 = as they are. tied: the weight is the embedding's, which
    loads it, so this layer has none.
    """

    def __init__(self, projection: Linear, *, soft_cap: float = 0.0, tied: bool = False, shard: Shard = WHOLE) -> None:
        self._projection = projection
        self._shard = shard
        parts = shard.split(projection.num_outputs, VOCABULARY_UNIT)
        self._sizes = [length(part) for part in parts]
        self._begins = np.array([part.start for part in parts], np.int64)
        self._soft_cap = soft_cap
        self._tied = tied

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32[rows, vocab_size]; for a follower, its part. out: see `CausalLM.logits`."""
        group = self._shard.group
        if group is None:
            return self._capped(self._projection(hidden, out).float())
        own = self._own(hidden)
        if not self._shard.leads:
            group.gather(own, self._sizes, None)
            return own
        logits = torch.empty(len(own), sum(self._sizes), device=own.device) if out is None else out
        group.gather(own, self._sizes, logits)
        return logits

    def peaks(self, hidden: torch.Tensor) -> Peaks:
        """`peaks_of` what a call gives for hidden [rows, hidden_size]; for a follower, of its part, with ids that count from its first."""
        group = self._shard.group
        if group is None:
            return peaks_of(self(hidden))
        own = peaks_of(self._own(hidden))
        # Two numbers a row: the bits of the id, and the value.
        sent = np.empty((len(own.ids), 2), np.float32)
        sent.view(np.int32)[:, 0], sent[:, 1] = own
        columns = [2] * group.size
        if not self._shard.leads:
            group.gather(torch.from_numpy(sent), columns, None)
            return own
        found = np.empty((len(sent), 2 * group.size), np.float32)
        group.gather(torch.from_numpy(sent), columns, torch.from_numpy(found))
        return self._largest(found.view(np.int32)[:, ::2], found[:, 1::2])

    def _largest(self, ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32]) -> Peaks:
        """ids, values: [rows, ranks], the peaks of each rank's part."""
        # The first that is a NaN, or the first of the largest: parts are in the order of ids, so of equal values it has the lowest id.
        ranks = values.argmax(axis=1)
        rows = np.arange(len(ranks))
        largest = values[rows, ranks]
        whole_ids = self._begins[ranks] + ids[rows, ranks]
        whole_ids[np.isnan(largest)] = -1
        return Peaks(whole_ids, largest)

    def _own(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part: float32 with a soft cap and on a CPU, else in the compute dtype."""
        own = self._projection(hidden)
        return self._capped(own.float()) if self._soft_cap else own

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        if self._soft_cap and logits.device.type != "cpu":
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        elif self._soft_cap:
            # Row by row: torch's vectorised tanh rounds the last elements of a call differently, and a row's bits must not depend
            # on how many rows there are.
            for row in logits:
                row.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits

    def weights(self, prefix: str) -> Iterator[Weight]:
        if not self._tied:
            yield from self._projection.weights(prefix)
