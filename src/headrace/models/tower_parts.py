"""What towers have before and beside their layers: patches of pixels, matrices that a checkpoint has in another shape, and tensors that are added.

A convolution whose stride is its size is a product over the pixels of each patch. Runs in the thread that runs the model.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from headrace.layers.linear import Linear
from headrace.layers.weight import Kept, Parts, Placement, TensorKeeper, Weight


def in_floats(placement: Placement) -> Placement:
    """The placement of layers that stay in floats where others are quantised: what they read varies too much, or is too short."""
    return replace(placement, quantization="none")


def patches_of(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """[tiles, channels, height, width] -> [tiles, rows, columns, channels * size * size], the patches row by row; what is left over at the right and
    at the bottom belongs to none."""
    cut = pixels[..., : pixels.shape[-2] // size * size, : pixels.shape[-1] // size * size]
    tiles = cut.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)


def shuffled(x: torch.Tensor, factor: int) -> torch.Tensor:
    """[tiles, side * side, size] -> [tiles * (side / factor)^2, size * factor^2]: the patches of a square one after the other, row by row."""
    side = int(x.shape[1] ** 0.5)
    squares = x.reshape(len(x), side // factor, factor, side // factor, factor, x.shape[2])
    return squares.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(0, 2)


class ReshapedLinear:
    """A linear layer whose matrix a checkpoint has in another shape. It is not quantised. stored: its shape in the checkpoint. to_matrix: makes
    [outputs, inputs] of it; from_matrix: the reverse."""

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
        return self._linear.kept()

    def restore(self, kept: Kept) -> None:
        self._linear.restore(kept)

    def staged(self, parts: Parts) -> Kept:
        matrices: dict[str, torch.Tensor] = {}
        for name, part in parts.items():
            assert isinstance(part, torch.Tensor), "a layer that is not quantised"
            matrices[name] = self._to_matrix(part) if name == ".weight" else part
        return self._linear.staged(matrices)

    def _load(self, inner: Weight, tensor: torch.Tensor) -> None:
        inner.load(self._to_matrix(tensor))

    def _read(self, inner: Weight) -> torch.Tensor:
        return self._from_matrix(inner.read())


def patch_layer(kernel: tuple[int, ...], hidden_size: int, placement: Placement, *, bias: bool) -> ReshapedLinear:
    """A linear layer over the values of a patch, whose matrix a checkpoint has in the shape of a convolution. kernel: of a patch: channels, sizes."""
    stored = (hidden_size, *kernel)
    return ReshapedLinear(
        math.prod(kernel),
        hidden_size,
        stored,
        lambda tensor: tensor.flatten(1),
        lambda matrix: matrix.reshape(stored),
        placement,
        bias=bias,
    )


def in_precision(values: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Values of items as the first layer takes them: float32 on the CPU, else in the precision of the weights."""
    return values if placement.device.type == "cpu" else values.to(placement.weight_dtype)


class Table(TensorKeeper):
    """A tensor that is added to hidden states, or multiplied with them: a table of positions, or a single row. In the model's precision, kept in
    float32."""

    def __init__(self, shape: tuple[int, ...], placement: Placement) -> None:
        super().__init__(placement)
        self._shape = shape
        self._dtype = placement.weight_dtype

    @property
    def rows(self) -> torch.Tensor:
        return self.tensors["rows"]

    def weights(self, name: str) -> Iterator[Weight]:
        yield replace(self.weight_of("rows", name, self._shape), read=lambda: self.rows.to(self._dtype))

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().own(tensor.to(self._dtype))
