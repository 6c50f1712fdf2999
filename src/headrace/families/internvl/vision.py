"""InternVL: a tower over square tiles of an image, whose neighbouring patches become one row, and two linear layers.

Source: Z. Chen et al., "InternVL" (2023), and "Expanding Performance Boundaries" (InternVL 2.5, 2024).
"""

from dataclasses import replace
from functools import partial

from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm
from headrace.layers.weight import Placement
from headrace.models.media import MediaEncoder
from headrace.models.tower_parts import in_floats, shuffled
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
    tower, size, floats = media.vision, config.hidden_size, in_floats(placement)
    blocks = replace(_OPTIONS, rms=tower.rms, qkv_bias=tower.qkv_bias)
    vision = ClipVision(media, placement, final_norm=tower.final_norm, names=_NAMES, blocks=blocks, stacked=True)
    merged = tower.hidden_size * media.shuffle**2
    norm = LayerNorm(merged, 1e-5, placement)
    up = Linear(merged, {"linear_1": size}, floats, bias=True)
    down = Linear(size, {"linear_2": size}, floats, bias=True)
    activate = activation(media.projector_act)
    layers = (norm, f"{_PROJECTOR}layer_norm"), (up, _PROJECTOR), (down, _PROJECTOR)
    return ProjectedEncoder(
        vision, partial(shuffled, factor=media.shuffle), lambda x: down(activate(up(norm(x)))), layers
    )
