"""Gemma 3: a SigLIP tower, means over squares of patches, a norm, and a product to the size of the text model.

Source: Gemma Team, "Gemma 3 Technical Report" (2025).
"""

from collections.abc import Iterator

import torch

from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.norm import RMSNorm
from headrace.layers.weight import Placement, Weight
from headrace.models.media import MediaEncoder
from headrace.models.tower_parts import ReshapedLinear
from headrace.models.towers import ClipVision, ProjectedEncoder

_PROJECTOR = "multi_modal_projector."


def encoder(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    return _Encoder(media, config.hidden_size, placement)


class _Encoder(ProjectedEncoder):
    sees_ahead = True

    def __init__(self, media: MediaConfig, hidden_size: int, placement: Placement) -> None:
        config = media.vision
        super().__init__(ClipVision(media, placement, final_norm=True))
        self._norm = RMSNorm(config.hidden_size, config.norm_eps, placement, unit_offset=1.0)
        sizes = config.hidden_size, hidden_size
        self._projection = ReshapedLinear(*sizes, sizes, _transposed, _transposed, placement)
        self._rows_of_side = int(media.mm_tokens**0.5)
        self._patches_of_row = config.image_size // config.patch_size // self._rows_of_side

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        return self._projection(self._norm(x))

    def rows_of(self, tiles: torch.Tensor) -> torch.Tensor:
        """Means over squares, summed in the same order for every square."""
        rows, inner = self._rows_of_side, self._patches_of_row
        squares = tiles.view(len(tiles), rows, inner, rows, inner, tiles.shape[2])
        total = torch.zeros_like(squares[:, :, 0, :, 0])
        for row in range(inner):
            for column in range(inner):
                total += squares[:, :, row, :, column]
        return (total / inner**2).flatten(0, 2)

    def weights(self) -> Iterator[Weight]:
        yield from self._vision.weights()
        yield from self._norm.weights(f"{_PROJECTOR}mm_soft_emb_norm")
        yield from self._projection.weights(f"{_PROJECTOR}mm_input_projection_weight")


def _transposed(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.t().contiguous()
