"""How layers name, take and give back their weights.

Owns `Weight` (one Hugging Face tensor of one layer) and `Placement` (where and in what precision a model lives). The layers make
`Weight`s; the loader fills them. Used by the thread that loads the model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import Scheme
from headrace.layers.quantization import WeightFormat, weight_format

Kept = Mapping[str, torch.Tensor | int | str | None]
"""What a layer keeps of its weights, by field."""

Parts = Mapping[str, torch.Tensor | QuantizedMatrix]
"""New tensors of one layer, by `Weight.part`."""


class Keeper(Protocol):
    """A layer that converts what it loads, and can take the result back instead.

    What it keeps is never written to once a step may read it: new weights are made beside the old ones, then it switches over.
    """

    def kept(self) -> Kept:
        """The converted weights; there once they have been loaded."""

    def restore(self, kept: Kept) -> None:
        """Take what `kept` or `staged` gave, without a copy, in place of loading. Quick; between two steps."""

    def staged(self, parts: Parts) -> Kept:
        """What it would keep with these parts in place of the present ones: copies, never `parts` themselves. Changes nothing. Slow."""


class Observable(Protocol):
    """A layer that shows its input to an observer, when it has one, before it computes."""

    observer: Callable[[torch.Tensor], None] | None


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint and the layer that wants it.

    name, shape: as Hugging Face has them. load: takes a tensor of this shape, any float dtype, and keeps a converted copy or, where
    nothing changes, the tensor itself. read: gives it back in Hugging Face's layout, in the precision that is kept.
    init: what a model without a checkpoint starts from. itemsize: bytes that one kept element takes, a fraction where weights are quantised.
    load_quantized: takes a quantised tensor instead, where the layer computes with one; None where it does not.
    layer: the linear layer whose matrix this is, for calibration; None for any other tensor.
    keepers: the layers that convert this tensor, so that it need not be loaded once all of them have been restored, and part: what it is
    to them; they may keep other weights beside it. Empty: it cannot be replaced while the model serves.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    read: Callable[[], torch.Tensor]
    init: Literal["normal", "ones", "zeros"] = "normal"
    itemsize: float = 4
    load_quantized: Callable[[QuantizedMatrix], None] | None = None
    layer: Observable | None = None
    keepers: tuple[Keeper, ...] = ()
    part: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model lives and how its linear layers compute.

    max_positions: longest sequence served, in tokens; tables by position have this many rows. quantization: of linear layers.
    """

    device: torch.device
    weight_dtype: torch.dtype
    max_positions: int
    quantization: Scheme = "none"

    @property
    def format(self) -> WeightFormat:
        """Of linear layers."""
        return weight_format(self.quantization)

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of activations: float32 on CPU, whatever the weights are; elsewhere the weights' own."""
        return torch.float32 if self.device.type == "cpu" else self.weight_dtype

    @property
    def unquantized(self) -> "Placement":
        """For a layer that must stay exact, such as a router."""
        return replace(self, quantization="none")

    @property
    def head(self) -> "Placement":
        """For the output projection: every token is chosen by it, so a format may leave it more bits, and a GPU leaves it all 16."""
        if self.device.type != "cpu":
            return self.unquantized
        return replace(self, quantization=self.format.facts.head or self.quantization)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A matrix on the device in the weights' dtype."""
        return tensor.to(device=self.device, dtype=self.weight_dtype)
