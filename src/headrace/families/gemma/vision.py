"""Gemma 3: a SigLIP tower, means over squares of patches, a norm, and a product to the size of the text model.

Source: Gemma Team, "Gemma 3 Technical Report" (2025).
"""

import torch

from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.norm import RMSNorm
from headrace.layers.weight import Placement
from headrace.models.media import MediaEncoder
from headrace.models.tower_parts import ReshapedLinear
from headrace.models.towers import ClipVision, ProjectedEncoder

_PROJECTOR = "multi_modal_projector."


def encoder(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    tower = media.vision
    vision = ClipVision(media, placement, final_norm=True)
    norm = RMSNorm(tower.hidden_size, tower.norm_eps, placement, unit_offset=1.0)
    sizes = tower.hidden_size, config.hidden_size
    projection = ReshapedLinear(*sizes, sizes, _transposed, _transposed, placement)
    rows = int(media.mm_tokens**0.5)
    inner = tower.image_size // tower.patch_size // rows

    def means(tiles: torch.Tensor) -> torch.Tensor:
        """Over squares, summed in the same order for every square."""
        squares = tiles.view(len(tiles), rows, inner, rows, inner, tiles.shape[2])
        total = torch.zeros_like(squares[:, :, 0, :, 0])
        for row in range(inner):
            for column in range(inner):
                total += squares[:, :, row, :, column]
        return (total / inner**2).flatten(0, 2)

    layers = (norm, f"{_PROJECTOR}mm_soft_emb_norm"), (projection, f"{_PROJECTOR}mm_input_projection_weight")
    return ProjectedEncoder(vision, means, lambda x: projection(norm(x)), layers, sees_ahead=True)


def _transposed(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.t().contiguous()
