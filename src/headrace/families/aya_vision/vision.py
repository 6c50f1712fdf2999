"""Aya Vision: a SigLIP tower over square tiles of an image, whose neighbouring patches become one row, a norm, and a gated layer.

Source: S. Dash et al., "Aya Vision: Advancing the Frontier of Multilingual Multimodality" (2025).
"""

from functools import partial

import torch

from headrace import kernels
from headrace.checkpoint.config_keys import MediaKeys
from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.families.aya_vision import projector_sizes
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm
from headrace.layers.weight import Placement
from headrace.models.media import MediaEncoder
from headrace.models.tower_parts import in_floats, shuffled
from headrace.models.towers import ClipVision, ProjectedEncoder

_PROJECTOR = "multi_modal_projector."


def encoder(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    inner, eps = projector_sizes(MediaKeys(config.around, "config.json"), config.hidden_size)
    merged, floats = media.vision.hidden_size * media.shuffle**2, in_floats(placement)
    vision = ClipVision(media, placement, final_norm=False)
    norm = LayerNorm(merged, eps, placement)
    up = Linear(merged, {"linear_1": inner}, floats, bias=True)
    down = Linear(inner // 2, {"linear_2": config.hidden_size}, floats, bias=True)

    def project(x: torch.Tensor) -> torch.Tensor:
        factors, gates = up(norm(x)).chunk(2, dim=1)
        return down(kernels.silu_mul(torch.cat([gates, factors], dim=1)))

    layers = (norm, f"{_PROJECTOR}layernorm"), (up, _PROJECTOR), (down, _PROJECTOR)
    return ProjectedEncoder(vision, partial(shuffled, factor=media.shuffle), project, layers)
