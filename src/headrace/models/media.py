"""What a model's encoder of images or sounds is to those who run it.

Owns `MediaInput` and the protocol `MediaEncoder`. The encoders are in `models/vision/`. Used by the thread that runs the model.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.layers.weight import Weight


@dataclass(frozen=True, slots=True)
class MediaInput:
    """The values of one item on the model's device: see `MediaItem` (messages/media.py)."""

    values: torch.Tensor
    grid: tuple[int, int, int] = (0, 0, 0)


Slices = Generator[None, None, list[torch.Tensor]]
"""Work that stops after each slice of it, and returns the rows of each item at the end."""


class MediaEncoder(Protocol):
    """Makes of each item the rows that stand in place of the embeddings of its tokens."""

    @property
    def num_slices(self) -> int:
        """How many times `slices` stops at most: after about as much work each, as of one layer."""

    @property
    def sees_ahead(self) -> bool:
        """Whether the text model lets the tokens of an image see each other in both directions: all of them must then be computed in one step."""

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """Encode items together. Returns of each [num_tokens, hidden_size of the text model], in the model's precision; on the CPU the bits do not
        depend on the other items."""

    def weights(self) -> Iterator[Weight]:
        """Every tensor it wants from a checkpoint, each once, under the checkpoint's names."""

    def fuse(self) -> str:
        """Run all layers as one native call from now on. Returns "", or why that is impossible; then they run one by one, with the same bits."""


def encode(encoder: MediaEncoder, items: Sequence[MediaInput]) -> list[torch.Tensor]:
    """All of the work at once, see `MediaEncoder.slices`."""
    work = encoder.slices(items)
    try:
        while True:
            next(work)
    except StopIteration as done:
        rows: list[torch.Tensor] = done.value
        return rows
