"""What a model's encoder of images or sounds is to those who run it.

Owns `MediaInput` and the protocol `MediaEncoder`. The encoders are in `headrace.families`. Used by the thread that runs the model.
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


@dataclass(slots=True)
class DeepRows:
    """What the images of a step add to the hidden states after each of the first layers (DeepStack; L. Meng et al., 2024).

    tokens: int64[num_tokens], among the step's; rows: [num_tokens, layers * hidden_size]. None between steps.
    """

    tokens: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def add_to(self, hidden: torch.Tensor, layer: int) -> None:
        """Add, in place, what belongs behind this layer."""
        if self.tokens is None or self.rows is None:
            return
        size = hidden.shape[1]
        own = self.rows[:, layer * size : (layer + 1) * size]
        if own.shape[1]:
            hidden[self.tokens] += own.to(hidden.dtype)


WORK_BYTES = 256 << 20
"""Memory that encoding takes, about: measured with 25 tiles of 729 patches and 1,152 elements."""

Slices = Generator[None, None, list[torch.Tensor]]
"""Work that stops after each slice of it, and returns the rows of each item at the end."""


class MediaEncoder(Protocol):
    """Makes of each item the rows that stand in place of the embeddings of its tokens."""

    @property
    def num_slices(self) -> int:
        """How many times `slices` stops for each of the `num_parts` (messages/media.py) of the items: once a layer."""

    @property
    def sees_ahead(self) -> bool:
        """Whether the text model lets the tokens of an image see each other in both directions: all of them must then be computed in one step."""

    @property
    def num_deep(self) -> int:
        """Of how many of the text model's first layers an image adds to the output: each row of the encoder has as many parts more."""

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """Encode items together. Returns of each [num_tokens, (1 + num_deep) * hidden_size of the text model], in the model's precision; on the CPU
        the bits do not depend on the other items."""

    def weights(self) -> Iterator[Weight]:
        """Every tensor it wants from a checkpoint, each once, under the checkpoint's names."""

    def fuse(self, native: bool = True) -> str:
        """Run each layer as one native call from now on, or, without `native`, op by op, with the same bits. Returns "", or why it runs op by op.
        Again after weights were loaded anew; what is fused keeps the weights alive."""


def encode(encoder: MediaEncoder, items: Sequence[MediaInput]) -> list[torch.Tensor]:
    """All of the work at once, see `MediaEncoder.slices`."""
    work = encoder.slices(items)
    try:
        while True:
            next(work)
    except StopIteration as done:
        rows: list[torch.Tensor] = done.value
        return rows
