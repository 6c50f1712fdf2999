"""Aya Vision: a SigLIP tower over square tiles of an image, whose neighbouring patches become one row, a norm, and a gated layer.

Source: S. Dash et al., "Aya Vision: Advancing the Frontier of Multilingual Multimodality" (2025).
"""

from collections.abc import Iterator

import torch

from headrace import kernels
from headrace.checkpoint.config_keys import MediaKeys
from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.families.aya_vision import projector_sizes
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm
from headrace.layers.weight import Placement, Weight
from headrace.models.media import MediaEncoder
from headrace.models.tower_parts import in_floats
from headrace.models.towers import ClipVision, ProjectedEncoder

_PROJECTOR = "multi_modal_projector."


def encoder(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    sizes = projector_sizes(MediaKeys(config.around, "config.json"), config.hidden_size)
    return _Encoder(media, config.hidden_size, *sizes, placement)


class _Encoder(ProjectedEncoder):
    def __init__(self, media: MediaConfig, hidden_size: int, inner: int, eps: float, placement: Placement) -> None:
        """hidden_size: of the text model. inner: elements between the projector's layers. eps: of its norm."""
        merged, floats = media.vision.hidden_size * media.shuffle**2, in_floats(placement)
        super().__init__(ClipVision(media, placement, final_norm=False), media.shuffle)
        self._norm = LayerNorm(merged, eps, placement)
        self._up = Linear(merged, {"linear_1": inner}, floats, bias=True)
        self._down = Linear(inner // 2, {"linear_2": hidden_size}, floats, bias=True)

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        factors, gates = self._up(self._norm(x)).chunk(2, dim=1)
        return self._down(kernels.silu_mul(torch.cat([gates, factors], dim=1)))

    def weights(self) -> Iterator[Weight]:
        yield from self._vision.weights()
        yield from self._norm.weights(f"{_PROJECTOR}layernorm")
        yield from self._up.weights(_PROJECTOR)
        yield from self._down.weights(_PROJECTOR)
