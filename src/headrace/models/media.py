"""What a model's encoder of images or sounds is to those who run it.

Owns `MediaInput` and the protocol `MediaEncoder`. The encoders are in `models/vision/`. Used by the thread that runs the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.layers.weight import Weight


@dataclass(frozen=True, slots=True)
class MediaInput:
    """The values of one item on the model's device: see `MediaItem` (messages/media.py)."""

    values: torch.Tensor
    grid: tuple[int, int, int] = (0, 0, 0)


class MediaEncoder(Protocol):
    """Makes of each item the rows that stand in place of the embeddings of its tokens."""

    def encode(self, items: Sequence[MediaInput]) -> list[torch.Tensor]:
        """Of each item [num_tokens, hidden_size of the text model], in the model's precision; on the CPU the bits do not depend on the other items."""

    def weights(self) -> Iterator[Weight]:
        """Every tensor it wants from a checkpoint, each once, under the checkpoint's names."""

    def fuse(self) -> str:
        """Run all layers as one native call from now on. Returns "", or why that is impossible; then they run one by one, with the same bits."""
