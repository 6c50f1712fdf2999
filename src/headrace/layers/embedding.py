"""Token embedding. Runs in the thread that runs the model."""

from collections.abc import Iterator

import torch

from headrace import kernels
from headrace.layers.linear import Linear
from headrace.layers.weight import Placement, Weight


class Embedding:
    """table[ids] * scale.

    tied: the output projection that shares this table. It keeps its own packed copy, because the kernels want another order of
    elements than a lookup by row does.
    """

    def __init__(
        self, vocab_size: int, size: int, placement: Placement, *, scale: float = 1.0, tied: Linear | None = None
    ) -> None:
        self._shape = (vocab_size, size)
        self._scale = scale
        self._placement = placement
        self._tied = tied
        self._table: torch.Tensor

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int[tokens] -> [tokens, size] in the compute dtype, a fresh tensor."""
        return kernels.embedding(ids, self._table, self._scale)

    def weights(self, prefix: str) -> Iterator[Weight]:
        """`<prefix>.weight`."""
        copies = 1 if self._tied is None else 2
        itemsize = copies * self._placement.weight_dtype.itemsize
        yield Weight(f"{prefix}.weight", self._shape, self._load, lambda: self._table, itemsize=itemsize)

    def _load(self, tensor: torch.Tensor) -> None:
        self._table = self._placement.place(tensor).contiguous()
        if self._tied is not None:
            for weight in self._tied.weights(""):
                weight.load(self._table)
