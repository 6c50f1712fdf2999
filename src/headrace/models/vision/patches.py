"""From pixels to what the first layer of a tower takes: patches, a linear layer over each, and tables of positions.

Owns `Patches` and `Table`. A convolution whose stride is its size is a product over the pixels of each patch. Runs in the thread that runs the model.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from headrace.layers.linear import Linear
from headrace.layers.weight import Kept, Parts, Placement, Weight
from headrace.models.vision.blocks import in_floats


def patches_of(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """[tiles, channels, height, width] -> [tiles, rows, columns, channels * size * size], the patches row by row; what is left over at the right and
    at the bottom belongs to none."""
    cut = pixels[..., : pixels.shape[-2] // size * size, : pixels.shape[-1] // size * size]
    tiles = cut.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)


class Patches:
    """A linear layer over the values of a patch, whose matrix a checkpoint has in the shape of a convolution.

    kernel: the shape of a patch in the checkpoint: channels, then sizes.
    """

    def __init__(self, kernel: tuple[int, ...], hidden_size: int, placement: Placement, *, bias: bool) -> None:
        self._kernel = kernel
        self._size = hidden_size
        in_size = 1
        for each in kernel:
            in_size *= each
        self._linear = Linear(in_size, {"": hidden_size}, in_floats(placement), bias=bias)

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """[patches, values of a patch] -> [patches, hidden_size]."""
        return self._linear(patches)

    def weights(self, prefix: str) -> Iterator[Weight]:
        """`<prefix>.weight`, `<prefix>.bias`."""
        for weight in self._linear.weights(""):
            name = f"{prefix}{weight.name}"
            if weight.part != ".weight":
                yield replace(weight, name=name)
                continue
            shape = (self._size, *self._kernel)
            yield replace(
                weight,
                name=name,
                shape=shape,
                load=partial(_load_flat, weight),
                read=partial(_read_shaped, weight, shape),
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
        flat = {}
        for name, part in parts.items():
            assert isinstance(part, torch.Tensor), "a patch embedding is not quantised"
            flat[name] = part.flatten(1) if part.dim() > 1 else part
        return self._linear.staged(flat)


def _load_flat(weight: Weight, tensor: torch.Tensor) -> None:
    weight.load(tensor.flatten(1))


def _read_shaped(weight: Weight, shape: tuple[int, ...]) -> torch.Tensor:
    return weight.read().view(shape)


class Table:
    """A tensor that is added to hidden states: a table of positions, or one row. It is kept in float32."""

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
