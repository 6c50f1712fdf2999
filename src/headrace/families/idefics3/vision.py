"""Idefics3 and SmolVLM: a SigLIP tower over square tiles of an image, whose neighbouring patches become one row, and a linear layer.

Sources: H. Laurençon et al., "Building and better understanding vision-language models" (Idefics3, 2024); A. Marafioti et al., "SmolVLM" (2025).
"""

from functools import partial

import torch

from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.linear import Linear
from headrace.layers.weight import Placement
from headrace.models.media import MediaEncoder
from headrace.models.tower_parts import in_floats, shuffled
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
    vision = _Vision(media, placement, "vision_model.", final_norm=True)
    merged = media.vision.hidden_size * media.shuffle**2
    projection = Linear(merged, {"proj": config.hidden_size}, in_floats(placement))
    layers = ((projection, "connector.modality_projection."),)
    return ProjectedEncoder(vision, partial(shuffled, factor=media.shuffle), projection, layers)
