"""InternVL: a tower over square tiles of an image, whose neighbouring patches become one row, and two linear layers.

Source: Z. Chen et al., "InternVL" (2023), and "Expanding Performance Boundaries" (InternVL 2.5, 2024).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm
from headrace.layers.weight import Placement, Weight
from headrace.messages.media import num_parts
from headrace.models.media import MediaEncoder, MediaInput, Slices
from headrace.models.tower_parts import Table, in_floats, in_precision, patch_layer, patches_of, shuffled
from headrace.models.towers import BlockOptions, Tower, TowerEncoder, activation, packed

_OPTIONS = BlockOptions(
    attention_norm="layernorm_before",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.projection_layer",
    mlp_norm="layernorm_after",
    up=("mlp.fc1",),
    down="mlp.fc2",
    scales=("lambda_1", "lambda_2"),
)
_EMBEDDINGS = "vision_tower.embeddings."
_PROJECTOR = "multi_modal_projector."


def encoder(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    return _Encoder(media, config.hidden_size, placement)


class _Encoder(TowerEncoder):
    def __init__(self, media: MediaConfig, hidden_size: int, placement: Placement) -> None:
        config = self._config = media.vision
        size, merged = config.hidden_size, config.hidden_size * media.shuffle**2
        self._placement = placement
        self._shuffle = media.shuffle
        self._patches = patch_layer(
            (config.num_channels, config.patch_size, config.patch_size), size, placement, bias=True
        )
        self._first = Table((1, 1, size), placement)
        self._positions = Table((1, (config.image_size // config.patch_size) ** 2 + 1, size), placement)
        options = replace(_OPTIONS, rms=config.rms, qkv_bias=config.qkv_bias)
        self.tower = Tower(config, options, "vision_tower.encoder.layer", placement)
        self._last_norm = LayerNorm(size, config.norm_eps, placement) if config.final_norm else None
        floats = in_floats(placement)
        self._norm = LayerNorm(merged, 1e-5, placement)
        self._up = Linear(merged, {"linear_1": hidden_size}, floats, bias=True)
        self._down = Linear(hidden_size, {"linear_2": hidden_size}, floats, bias=True)
        self._activate = activation(media.projector_act)

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """An item's values: [tiles, channels, height, width]; its rows are those of the tiles, one after the other."""
        pixels = in_precision(torch.cat([item.values for item in items]), self._placement)
        patches = patches_of(pixels, self._config.patch_size).flatten(1, 2)
        x = self._patches(patches.flatten(0, 1)).view(*patches.shape[:2], -1)
        x = torch.cat([self._first.rows.to(x.dtype).expand(len(x), 1, -1), x], dim=1)
        x = x + self._positions.rows.to(x.dtype)
        num_tokens = x.shape[1]
        images = packed([num_tokens] * len(pixels), x.device)
        parts = num_parts(tuple(item.values.shape) for item in items)
        x = yield from self.tower.run(x.flatten(0, 1), images, num_parts=parts)
        if self._last_norm is not None:
            x = self._last_norm(x)
        x = shuffled(x.unflatten(0, (-1, num_tokens))[:, 1:], self._shuffle)
        x = self._down(self._activate(self._up(self._norm(x))))
        rows = (num_tokens - 1) // self._shuffle**2
        return list(x.split([rows * len(item.values) for item in items]))

    def weights(self) -> Iterator[Weight]:
        yield from self._first.weights(f"{_EMBEDDINGS}cls_token")
        projection = f"{_EMBEDDINGS}patch_embeddings.projection."
        yield from self._patches.weights(f"{projection}weight", f"{projection}bias")
        yield from self._positions.weights(f"{_EMBEDDINGS}position_embeddings")
        yield from self.tower.weights()
        if self._last_norm is not None:
            yield from self._last_norm.weights("vision_tower.layernorm")
        yield from self._norm.weights(f"{_PROJECTOR}layer_norm")
        yield from self._up.weights(_PROJECTOR)
        yield from self._down.weights(_PROJECTOR)
