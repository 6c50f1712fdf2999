"""Layers over the tokens of several images or sounds, packed one after the other without padding.

Owns the order of the layers and where work stops between them. Does not own what is before the first layer and after the last one, which each
family's file does. Runs in the thread that runs the model.
"""

from collections.abc import Callable, Generator, Iterator
from itertools import repeat

import torch

from headrace.checkpoint.media_keys import TowerConfig
from headrace.layers.weight import Placement, Weight
from headrace.models.towers.blocks import BlockOptions, PackedItems, TowerBlock

MAX_TOKENS = 4096
"""A layer computes items together while they have at most this many tokens: what lies between its parts takes much more memory than its input."""


class Tower:
    """The layers of a config. layers: prefix of their tensors, before the number."""

    def __init__(self, config: TowerConfig, options: BlockOptions, layers: str, placement: Placement) -> None:
        self.config = config
        self._layers = layers
        self._blocks = [TowerBlock(config, options, placement) for _ in range(config.num_layers)]

    @property
    def num_slices(self) -> int:
        """How many times `run` stops."""
        return len(self._blocks)

    def run(
        self,
        x: torch.Tensor,
        items: PackedItems,
        windows: PackedItems | None = None,
        tap: Callable[[int, torch.Tensor], None] = lambda layer, x: None,
        num_parts: int = 1,
    ) -> Generator[None, None, torch.Tensor]:
        """All layers over x [tokens, hidden_size], which it may overwrite, stopping after each. Returns the same shape.

        windows: what a token sees in layers that are not in the config's `full_layers`; None = all of its item.
        tap: called after each layer with its number and what it gives. num_parts: into which each layer's work is cut, with a stop after each:
        between items, or, if they are fewer, within the layer.
        """
        for index, block in enumerate(self._blocks):
            seen = items if windows is None or index in self.config.full_layers else windows
            if num_parts == 1:
                x = _computed(block, x, seen)
            elif num_parts <= len(seen.row_starts) - 1:
                for number, (tokens, piece) in enumerate(pieces_of(seen, num_parts)):
                    if number:
                        yield
                    y = _computed(block, x[tokens], piece)
                    if y.data_ptr() != x[tokens].data_ptr():  # else it is in place
                        x[tokens] = y
            else:
                x = yield from _with_stops(block.in_parts(x, seen, num_parts), num_parts - 1)
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


def _with_stops(work: Generator[None, None, torch.Tensor], num_stops: int) -> Generator[None, None, torch.Tensor]:
    """The work, which stops as often or less often, with exactly so many stops."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            yield from repeat(None, num_stops)
            x: torch.Tensor = done.value
            return x
        num_stops -= 1
        yield


def pieces_of(items: PackedItems, num_pieces: int) -> list[tuple[slice, PackedItems]]:
    """Neighbouring items in so many pieces, with the tokens that are theirs."""
    count = len(items.row_starts) - 1
    assert num_pieces <= max(1, count), (num_pieces, count)
    return [_some(items, count * i // num_pieces, count * (i + 1) // num_pieces) for i in range(num_pieces)]


def _some(items: PackedItems, first: int, last: int) -> tuple[slice, PackedItems]:
    """Items first .. last - 1, and the tokens that are theirs."""
    starts = items.row_starts[first : last + 1]
    tokens = slice(int(starts[0]), int(starts[-1]))
    rope = None if items.rope is None else (items.rope[0][tokens], items.rope[1][tokens])
    return tokens, PackedItems(starts - starts[0], items.positions[: tokens.stop - tokens.start], rope)


def _computed(block: TowerBlock, x: torch.Tensor, items: PackedItems) -> torch.Tensor:
    """A layer over x, which it may overwrite, a few of the items at a time where that takes less memory."""
    if len(x) <= MAX_TOKENS or block.is_one_call(items):
        return block(x, items)
    starts: list[int] = items.row_starts.tolist()
    first = 0
    for last in range(1, len(starts)):
        if last + 1 == len(starts) or starts[last + 1] - starts[first] > MAX_TOKENS:
            tokens, some = _some(items, first, last)
            x[tokens] = block(x[tokens], some)
            first = last
    return x


def packed(
    lengths: list[int], device: torch.device, rope: tuple[torch.Tensor, torch.Tensor] | None = None
) -> PackedItems:
    """Items of so many tokens each; those without any are left out. rope: see `PackedItems`."""
    starts = [0]
    for length in lengths:
        if length:
            starts.append(starts[-1] + length)
    positions = torch.arange(starts[-1], dtype=torch.int32, device=device)
    return PackedItems(torch.tensor(starts, dtype=torch.int32), positions, rope)


def axial_rope(
    rows: torch.Tensor, columns: torch.Tensor, row_frequencies: torch.Tensor, column_frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32[tokens, head_dim / 2], of patches at these places: half of the pairs turn by the row, half by the column.

    rows, columns: [tokens]. row_frequencies, column_frequencies: float32[head_dim / 4], radians for a patch.
    """
    angles = torch.cat([rows[:, None].float() * row_frequencies, columns[:, None].float() * column_frequencies], dim=1)
    return angles.cos(), angles.sin()
