"""InternVL: a tower over square tiles of an image, whose neighbouring patches become one row, and two linear layers.

Source: Z. Chen et al., "InternVL" (2023), and "Expanding Performance Boundaries" (InternVL 2.5, 2024).
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm
from headrace.layers.weight import Placement, Weight
from headrace.models.media import MediaEncoder
from headrace.models.tower_parts import in_floats
from headrace.models.towers import BlockOptions, ClipVision, ProjectedEncoder, VisionNames, activation

_OPTIONS = BlockOptions(
    attention_norm="layernorm_before",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.projection_layer",
    mlp_norm="layernorm_after",
    up=("mlp.fc1",),
    down="mlp.fc2",
    scales=("lambda_1", "lambda_2"),
)
_NAMES = VisionNames(
    first="embeddings.cls_token",
    patches="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    layers="encoder.layer",
    final_norm="layernorm",
)
_PROJECTOR = "multi_modal_projector."


def encoder(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    return _Encoder(media, config.hidden_size, placement)


class _Encoder(ProjectedEncoder):
    def __init__(self, media: MediaConfig, hidden_size: int, placement: Placement) -> None:
        config, floats = media.vision, in_floats(placement)
        blocks = replace(_OPTIONS, rms=config.rms, qkv_bias=config.qkv_bias)
        vision = ClipVision(media, placement, final_norm=config.final_norm, names=_NAMES, blocks=blocks, stacked=True)
        super().__init__(vision, media.shuffle)
        merged = config.hidden_size * media.shuffle**2
        self._norm = LayerNorm(merged, 1e-5, placement)
        self._up = Linear(merged, {"linear_1": hidden_size}, floats, bias=True)
        self._down = Linear(hidden_size, {"linear_2": hidden_size}, floats, bias=True)
        self._activate = activation(media.projector_act)

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._activate(self._up(self._norm(x))))

    def weights(self) -> Iterator[Weight]:
        yield from self._vision.weights()
        yield from self._norm.weights(f"{_PROJECTOR}layer_norm")
        yield from self._up.weights(_PROJECTOR)
        yield from self._down.weights(_PROJECTOR)
