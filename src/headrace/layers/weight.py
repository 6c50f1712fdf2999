"""How layers name, take and give back their weights.

Owns `Weight` (one Hugging Face tensor of one layer) and `Placement` (where and in what precision a model lives). The layers make
`Weight`s; the loader fills them. Used by the thread that loads the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint and the layer that wants it.

    name, shape: as Hugging Face has them. load: takes a tensor of this shape, any float dtype, and keeps a converted copy or, where
    nothing changes, the tensor itself. read: gives it back in Hugging Face's layout, in the precision that is kept.
    init: what a model without a checkpoint starts from. itemsize: bytes that one kept element takes.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    read: Callable[[], torch.Tensor]
    init: Literal["normal", "ones", "zeros"] = "normal"
    itemsize: int = 4


class HasWeights(Protocol):
    """A layer."""

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Its tensors; names begin with `prefix`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model lives. max_positions: longest sequence served, in tokens; tables by position have this many rows."""

    device: torch.device
    weight_dtype: torch.dtype
    max_positions: int

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of activations: float32 on CPU, whatever the weights are; elsewhere the weights' own."""
        return torch.float32 if self.device.type == "cpu" else self.weight_dtype

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A matrix on the device in the weights' dtype."""
        return tensor.to(device=self.device, dtype=self.weight_dtype)
