"""Idefics3 and SmolVLM: a SigLIP tower over square tiles of an image, whose neighbouring patches become one row, and a linear layer.

Owns the families' order of parts and their names. Runs in the thread that runs the model.

Sources: H. Laurençon et al., "Building and better understanding vision-language models" (Idefics3, 2024); A. Marafioti et al., "SmolVLM" (2025).
"""

from collections.abc import Iterator, Sequence

import torch

from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.linear import Linear
from headrace.layers.weight import Placement, Weight
from headrace.models.media import MediaEncoder, MediaInput, Slices
from headrace.models.towers.blocks import in_floats
from headrace.models.towers.clip import ClipEyes
from headrace.models.towers.patches import shuffled


class _Eyes(ClipEyes):
    """Positions are found by the share of the side that is before a patch, in float32, which may give two patches the same."""

    def positions(self, pixels: torch.Tensor) -> torch.Tensor:
        """See `ClipEyes.positions`."""
        table, side = super().positions(pixels), self.side
        bounds = torch.arange(1 / side, 1.0, 1 / side)
        shares = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
        buckets = torch.bucketize(shares.clamp(max=1.0 - 1e-6), bounds, right=True)
        places = buckets[:, None] * side + buckets[None, :]
        return table[places.flatten().to(table.device)]


def encoder(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    """See `families.Vision`."""
    return _Encoder(media, config.hidden_size, placement)


class _Encoder:
    """A `MediaEncoder`."""

    sees_ahead = False
    num_deep = 0

    def __init__(self, media: MediaConfig, hidden_size: int, placement: Placement) -> None:
        """hidden_size: of the text model."""
        config = media.vision
        self._eyes = _Eyes(media, placement, "vision_model.", final_norm=True)
        self._shuffle = media.shuffle
        outputs = {"proj": hidden_size}
        self._projection = Linear(config.hidden_size * media.shuffle**2, outputs, in_floats(placement))

    @property
    def num_slices(self) -> int:
        """See `MediaEncoder`."""
        return self._eyes.tower.num_slices

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """See `MediaEncoder`. An item's values: [tiles, channels, height, width]; its rows are those of the tiles, one after the other."""
        tiles = yield from self._eyes.run(items)
        rows = [shuffled(part, self._shuffle) for part in tiles]
        x = self._projection(torch.cat(rows))
        return list(x.split([len(part) for part in rows]))

    def weights(self) -> Iterator[Weight]:
        """See `MediaEncoder`."""
        yield from self._eyes.weights()
        yield from self._projection.weights("connector.modality_projection.")

    def fuse(self, native: bool = True) -> str:
        """See `MediaEncoder`."""
        return self._eyes.tower.fuse(native)
