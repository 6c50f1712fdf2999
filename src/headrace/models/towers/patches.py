"""From pixels to what the first layer of a tower takes: patches, and a linear layer over each.

A convolution whose stride is its size is a product over the pixels of each patch. Runs in the thread that runs the model.
"""

import math

import torch

from headrace.layers.weight import Placement
from headrace.models.towers.reshaped import ReshapedLinear


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
