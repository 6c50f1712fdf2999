"""Layers over the patches of several images, packed one after the other without padding.

Owns the order of the layers and where work stops between them. Does not own what is before the first layer and after the last one, which each
family's file does. Runs in the thread that runs the model.
"""

from collections.abc import Callable, Generator, Iterator

import torch

from headrace.checkpoint.media_config import VisionConfig
from headrace.layers.weight import Placement, Weight
from headrace.models.vision.blocks import BlockOptions, PackedImages, VisionBlock

MAX_TOKENS = 4096
"""A layer computes images together while they have at most this many tokens: what lies between its parts takes much more memory than its input."""


class Tower:
    """The layers of a config. layers: prefix of their tensors, before the number."""

    def __init__(self, config: VisionConfig, options: BlockOptions, layers: str, placement: Placement) -> None:
        self.config = config
        self._layers = layers
        self._blocks = [VisionBlock(config, options, placement) for _ in range(config.num_layers)]

    @property
    def num_slices(self) -> int:
        """How many times `run` stops."""
        return len(self._blocks)

    def run(
        self,
        x: torch.Tensor,
        images: PackedImages,
        windows: PackedImages | None = None,
        tap: Callable[[int, torch.Tensor], None] = lambda layer, x: None,
    ) -> Generator[None, None, torch.Tensor]:
        """All layers over x [tokens, hidden_size], which it may overwrite, stopping after each. Returns the same shape.

        windows: what a token sees in layers that are not in the config's `full_layers`; None = all of its image.
        tap: called after each layer with its number and what it gives.
        """
        whole = parts_of(images)
        cut = whole if windows is None else parts_of(windows)
        for index, block in enumerate(self._blocks):
            parts = whole if index in self.config.full_layers else cut
            x = block(x, images) if windows is None and block.is_one_call(images) else _in_parts(block, x, parts)
            tap(index, x)
            yield
        return x

    def fuse(self, native: bool = True) -> str:
        """See `MediaEncoder.fuse`."""
        reasons = [block.fuse(native) for block in self._blocks]
        return next((reason for reason in reasons if reason), "")

    def weights(self) -> Iterator[Weight]:
        """The layers' tensors."""
        for index, block in enumerate(self._blocks):
            yield from block.weights(f"{self._layers}.{index}.")


def parts_of(images: PackedImages) -> list[tuple[slice, PackedImages]]:
    """Neighbouring images of at most MAX_TOKENS together, or a single larger one, with the tokens that are theirs."""
    starts: list[int] = images.row_starts.tolist()
    parts = []
    first = 0
    for last in range(1, len(starts)):
        if last + 1 < len(starts) and starts[last + 1] - starts[first] <= MAX_TOKENS:
            continue
        tokens = slice(starts[first], starts[last])
        rope = None if images.rope is None else (images.rope[0][tokens], images.rope[1][tokens])
        own = PackedImages(
            images.row_starts[first : last + 1] - starts[first], images.positions[: starts[last] - starts[first]], rope
        )
        parts.append((tokens, own))
        first = last
    return parts


def _in_parts(block: VisionBlock, x: torch.Tensor, parts: list[tuple[slice, PackedImages]]) -> torch.Tensor:
    if len(parts) == 1:
        return block(x, parts[0][1])
    for tokens, images in parts:
        x[tokens] = block(x[tokens], images)
    return x


def packed(
    lengths: list[int], device: torch.device, rope: tuple[torch.Tensor, torch.Tensor] | None = None
) -> PackedImages:
    """Images of so many tokens each; those without any are left out. rope: see `PackedImages`."""
    starts = [0]
    for length in lengths:
        if length:
            starts.append(starts[-1] + length)
    positions = torch.arange(starts[-1], dtype=torch.int32, device=device)
    return PackedImages(torch.tensor(starts, dtype=torch.int32), positions, rope)


def axial_rope(
    rows: torch.Tensor, columns: torch.Tensor, row_frequencies: torch.Tensor, column_frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32[tokens, head_dim / 2], of patches at these places: half of the pairs turn by the row, half by the column.

    rows, columns: [tokens]. row_frequencies, column_frequencies: float32[head_dim / 4], radians for a patch.
    """
    angles = torch.cat([rows[:, None].float() * row_frequencies, columns[:, None].float() * column_frequencies], dim=1)
    return angles.cos(), angles.sin()
