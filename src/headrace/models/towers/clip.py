"""The tower of CLIP and SigLIP, over images of one size. Runs in the thread that runs the model.

Sources: A. Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (CLIP, 2021); X. Zhai et al., "Sigmoid Loss for
Language Image Pre-Training" (SigLIP, 2023).
"""

from collections.abc import Iterator, Sequence

import torch

from headrace.checkpoint.media_config import MediaConfig
from headrace.layers.norm import LayerNorm
from headrace.layers.weight import Placement, Weight
from headrace.messages.media import num_parts
from headrace.models.media import MediaInput, Slices
from headrace.models.towers.blocks import BlockOptions
from headrace.models.towers.patches import patch_layer, patches_of
from headrace.models.towers.reshaped import in_precision
from headrace.models.towers.table import Table
from headrace.models.towers.tower import Tower, packed

_OPTIONS = BlockOptions(
    attention_norm="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    mlp_norm="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
)


class ClipEyes:
    """A tower over images of one size: CLIP, whose first token is of no patch, and SigLIP. Gives [images, tokens of an image, hidden_size].

    final_norm: the tower's last norm is computed, too.
    """

    def __init__(
        self, media: MediaConfig, placement: Placement, prefix: str = "vision_tower.", *, final_norm: bool
    ) -> None:
        config = media.vision
        self._config = config
        self._prefix = prefix
        self._placement = placement
        self.side = config.image_size // config.patch_size
        self._is_clip = config.tower == "clip"
        kernel = (config.num_channels, config.patch_size, config.patch_size)
        self._patches = patch_layer(kernel, config.hidden_size, placement, bias=not self._is_clip)
        self._positions = Table((self.side**2 + self._is_clip, config.hidden_size), placement)
        self._first = Table((config.hidden_size,), placement) if self._is_clip else None
        self._norm = LayerNorm(config.hidden_size, config.norm_eps, placement) if self._is_clip else None
        self.tower = Tower(config, _OPTIONS, f"{prefix}encoder.layers", placement)
        self._final_norm = LayerNorm(config.hidden_size, config.norm_eps, placement) if final_norm else None
        self._drops_first = media.drops_first

    def run(self, items: Sequence[MediaInput]) -> Slices:
        """See `MediaEncoder.slices`."""
        pixels = torch.cat([in_precision(item.values, self._placement) for item in items])
        patches = patches_of(pixels, self._config.patch_size).flatten(1, 2)
        x = self._patches(patches.flatten(0, 1)).view(*patches.shape[:2], -1)
        if self._first is not None:
            first = self._first.rows.to(x.dtype).expand(len(x), 1, -1)
            x = torch.cat([first, x], dim=1)
        x = x + self.positions(pixels).to(x.dtype)
        num_tokens = x.shape[1]
        x = x.flatten(0, 1)
        if self._norm is not None:
            x = self._norm(x)
        parts = num_parts(tuple(item.values.shape) for item in items)
        x = yield from self.tower.run(x, packed([num_tokens] * len(pixels), x.device), num_parts=parts)
        if self._final_norm is not None:
            x = self._final_norm(x)
        rows = x.unflatten(0, (-1, num_tokens))
        if self._drops_first:
            rows = rows[:, 1:]
        return list(rows.split([len(item.values) for item in items]))

    def positions(self, pixels: torch.Tensor) -> torch.Tensor:
        """What is added to each token. pixels: [images, channels, height, width], of the tower's own size."""
        assert pixels.shape[-1] == pixels.shape[-2] == self._config.image_size, pixels.shape
        return self._positions.rows

    def weights(self) -> Iterator[Weight]:
        """The tower's tensors, as far as it is computed."""
        embeddings = f"{self._prefix}embeddings."
        if self._first is not None:
            yield from self._first.weights(f"{embeddings}class_embedding")
        yield from self._patches.weights(f"{embeddings}patch_embedding.weight", f"{embeddings}patch_embedding.bias")
        yield from self._positions.weights(f"{embeddings}position_embedding.weight")
        if self._norm is not None:
            yield from self._norm.weights(f"{self._prefix}pre_layrnorm")
        yield from self.tower.weights()
        if self._final_norm is not None:
            yield from self._final_norm.weights(f"{self._prefix}post_layernorm")
