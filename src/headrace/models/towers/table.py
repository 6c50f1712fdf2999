"""Tensors that are added to hidden states, or multiplied with them: tables of positions, and single rows. Runs in the thread that runs the model."""

from collections.abc import Iterator

import torch

from headrace.layers.weight import Kept, Parts, Placement, Weight


class Table:
    """A tensor of the model's precision, kept in float32."""

    def __init__(self, shape: tuple[int, ...], placement: Placement) -> None:
        self._shape = shape
        self._placement = placement
        self.rows: torch.Tensor

    def weights(self, name: str) -> Iterator[Weight]:
        """One tensor of this name."""
        yield Weight(name, self._shape, self._load, self._read, itemsize=4, keepers=(self,), part="rows")

    def kept(self) -> Kept:
        """See `Keeper`."""
        return {"rows": self.rows}

    def restore(self, kept: Kept) -> None:
        """See `Keeper`."""
        rows = kept["rows"]
        assert isinstance(rows, torch.Tensor)
        self.rows = rows

    def staged(self, parts: Parts) -> Kept:
        """See `Keeper`."""
        (tensor,) = parts.values()
        assert isinstance(tensor, torch.Tensor), "a quantised table"
        return {"rows": self._own(tensor)}

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        rounded = tensor.to(self._placement.weight_dtype)
        return rounded.to(device=self._placement.device, dtype=torch.float32, copy=True)

    def _load(self, tensor: torch.Tensor) -> None:
        self.rows = self._own(tensor)

    def _read(self) -> torch.Tensor:
        return self.rows.to(self._placement.weight_dtype)
