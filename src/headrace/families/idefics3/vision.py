"""Idefics3 and SmolVLM: a SigLIP tower over square tiles of an image, whose neighbouring patches become one row, and a linear layer.

Sources: H. Laurençon et al., "Building and better understanding vision-language models" (Idefics3, 2024); A. Marafioti et al., "SmolVLM" (2025).
"""

from collections.abc import Iterator

import torch

from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.linear import Linear
from headrace.layers.weight import Placement, Weight
from headrace.models.media import MediaEncoder
from headrace.models.tower_parts import in_floats
from headrace.models.towers import ClipVision, ProjectedEncoder


class _Vision(ClipVision):
    """Positions are found by the share of the side that is before a patch, in float32, which may give two patches the same."""

    def positions(self, pixels: torch.Tensor) -> torch.Tensor:
        table, side = super().positions(pixels), self.side
        bounds = torch.arange(1 / side, 1.0, 1 / side)
        shares = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
        buckets = torch.bucketize(shares.clamp(max=1.0 - 1e-6), bounds, right=True)
        places = buckets[:, None] * side + buckets[None, :]
        return table[places.flatten().to(table.device)]


def encoder(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    return _Encoder(media, config.hidden_size, placement)


class _Encoder(ProjectedEncoder):
    def __init__(self, media: MediaConfig, hidden_size: int, placement: Placement) -> None:
        config = media.vision
        super().__init__(_Vision(media, placement, "vision_model.", final_norm=True), media.shuffle)
        outputs = {"proj": hidden_size}
        self._projection = Linear(config.hidden_size * media.shuffle**2, outputs, in_floats(placement))

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        return self._projection(x)

    def weights(self) -> Iterator[Weight]:
        yield from self._vision.weights()
        yield from self._projection.weights("connector.modality_projection.")
