"""Linear layers whose matrix a checkpoint has in another shape, such as that of a convolution. Runs in the thread that runs the model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from headrace.layers.linear import Linear
from headrace.layers.weight import Kept, Parts, Placement, Weight
from headrace.models.towers.blocks import in_floats


class ReshapedLinear:
    """A linear layer whose matrix a checkpoint has in another shape. It is not quantised.

    stored: its shape in the checkpoint. to_matrix: makes [outputs, inputs] of it; from_matrix: the reverse.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        stored: tuple[int, ...],
        to_matrix: Callable[[torch.Tensor], torch.Tensor],
        from_matrix: Callable[[torch.Tensor], torch.Tensor],
        placement: Placement,
        *,
        bias: bool = False,
    ) -> None:
        self._linear = Linear(in_size, {"": out_size}, in_floats(placement), bias=bias)
        self._stored = stored
        self._to_matrix, self._from_matrix = to_matrix, from_matrix

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_size] -> [rows, out_size]."""
        return self._linear(x)

    def weights(self, weight: str, bias: str = "") -> Iterator[Weight]:
        """Tensors of these names; bias: where there is one."""
        for inner in self._linear.weights(""):
            if inner.part == ".bias":
                yield replace(inner, name=bias, keepers=(self,))
            else:
                yield replace(
                    inner,
                    name=weight,
                    shape=self._stored,
                    load=partial(self._load, inner),
                    read=partial(self._read, inner),
                    layer=None,
                    keepers=(self,),
                    own=(),
                )

    def kept(self) -> Kept:
        """See `Keeper`."""
        return self._linear.kept()

    def restore(self, kept: Kept) -> None:
        """See `Keeper`."""
        self._linear.restore(kept)

    def staged(self, parts: Parts) -> Kept:
        """See `Keeper`."""
        matrices: dict[str, torch.Tensor] = {}
        for name, part in parts.items():
            assert isinstance(part, torch.Tensor), "a layer that is not quantised"
            matrices[name] = self._to_matrix(part) if name == ".weight" else part
        return self._linear.staged(matrices)

    def _load(self, inner: Weight, tensor: torch.Tensor) -> None:
        inner.load(self._to_matrix(tensor))

    def _read(self, inner: Weight) -> torch.Tensor:
        return self._from_matrix(inner.read())


def in_precision(values: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Values of items as the first layer takes them: float32 on the CPU, else in the precision of the weights."""
    return values if placement.device.type == "cpu" else values.to(placement.weight_dtype)
