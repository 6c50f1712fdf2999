"""A model's encoder of images or sounds as those who run it see it: `MediaInput`, the protocol `MediaEncoder`, and the positions of its rows.

The encoders are in `headrace.families`. Used by the thread that runs the model.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.layers.weight import Weight
from headrace.media_kinds import MediaKind
from headrace.messages.media import time_places
from headrace.messages.requests import PromptContent


@dataclass(frozen=True, slots=True)
class MediaInput:
    """The values of one item on the model's device: see `MediaItem` (messages/media.py)."""

    values: torch.Tensor
    grid: tuple[int, int, int] = (0, 0, 0)


@dataclass(slots=True)
class DeepRows:
    """What the images of a step add to the hidden states after each of the first layers (DeepStack; L. Meng et al., 2024). tokens:
    int64[num_tokens], among the step's; rows: [num_tokens, layers * hidden_size]. None between steps."""

    tokens: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def add_to(self, hidden: torch.Tensor, layer: int) -> None:
        if self.tokens is None or self.rows is None:
            return
        size = hidden.shape[1]
        own = self.rows[:, layer * size : (layer + 1) * size]
        if own.shape[1]:
            hidden[self.tokens] += own.to(hidden.dtype)


WORK_BYTES = 256 << 20  # memory that encoding takes, about: measured with 25 tiles of 729 patches and 1,152 elements
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


Places = npt.NDArray[np.int32]  # int32[3, num_tokens]: in time, height and width


def places_of(content: PromptContent, merge_size: int, places_per_second: float = 0.0) -> tuple[Places, int]:
    """The places of a prompt's tokens for rotary embedding in three parts (M-RoPE), and what is added to the index of a token after the prompt, for
    all three. Sources: P. Wang et al., "Qwen2-VL" (2024), section 2.1; S. Bai et al., "Qwen2.5-VL Technical Report" (2025), section 2.1.2.

    Tokens of text are at the same place in all three. Those of an image are at its place in time and, from there on, in its rows and columns of
    `merge_size` patches each. Those of a video are, step by step, at places in time: one for each step, or so many for a second. Text after
    either goes on behind the last of its places, as in the papers and in the code of the models' authors. transformers 5.23 lets text go on behind
    the longer side of a frame, in the midst of a longer video's time, and yet generated tokens behind all of it.
    """
    places = np.tile(np.arange(content.num_tokens, dtype=np.int32), (3, 1))
    shift = 0
    for span in content.spans:
        item = content.media[span.item]
        rows, columns = (side // merge_size for side in item.grid[1:])
        assert span.length % (rows * columns) == 0, (span, item.grid)
        first = span.start + shift
        index = np.arange(span.length)
        inside = places[:, span.start : span.end]
        steps = index // (rows * columns)
        if item.kind == MediaKind.VIDEO and places_per_second:
            steps = time_places(steps, places_per_second * item.step_s)
        inside[0] = first + steps
        inside[1] = first + index // columns % rows
        inside[2] = first + index % columns
        shift += int(inside.max()) + 1 - first - span.length
        places[:, span.end :] = np.arange(span.end, content.num_tokens, dtype=np.int32) + shift
    return places, shift
