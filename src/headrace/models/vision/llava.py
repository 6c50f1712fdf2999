"""LLaVA, Pixtral and Mistral 3: a CLIP, SigLIP or Pixtral tower, and two linear layers to the size of the text model.

Owns the families' order of parts and their names. Runs in the thread that runs the model.

Sources: H. Liu et al., "Visual Instruction Tuning" (2023); P. Agrawal et al., "Pixtral 12B" (2024).
"""

from collections.abc import Iterator, Sequence

import torch

from headrace.checkpoint.media_config import MediaConfig
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm, RMSNorm
from headrace.layers.weight import Placement, Weight
from headrace.messages.media import num_parts
from headrace.models.media import MediaInput, Slices
from headrace.models.towers.blocks import BlockOptions, activation, in_floats
from headrace.models.towers.reshaped import in_precision
from headrace.models.towers.table import Table
from headrace.models.towers.tower import Tower, axial_rope, packed
from headrace.models.vision.patches import patch_layer, patches_of

_CLIP = BlockOptions(
    attention_norm="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    mlp_norm="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
)
_PIXTRAL = BlockOptions(
    attention_norm="attention_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    mlp_norm="ffn_norm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    rms=True,
    bias=False,
)
SIGLIP = _CLIP
"""SigLIP's layers have the names of CLIP's."""

_PREFIX = "vision_tower."
_PROJECTOR = "multi_modal_projector."


class ClipEyes:
    """A tower over images of one size: CLIP, whose first token is of no patch, and SigLIP. Gives [images, tokens of an image, hidden_size].

    final_norm: the tower's last norm is computed, too.
    """

    def __init__(self, media: MediaConfig, placement: Placement, prefix: str = _PREFIX, *, final_norm: bool) -> None:
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
        self.tower = Tower(config, SIGLIP, f"{prefix}encoder.layers", placement)
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


class PixtralEyes:
    """A tower over images of any size: rotary positions by row and column. Gives [patches of an image, hidden_size]."""

    def __init__(self, media: MediaConfig, placement: Placement) -> None:
        config = media.vision
        self._config = config
        self._placement = placement
        kernel = (config.num_channels, config.patch_size, config.patch_size)
        self._patches = patch_layer(kernel, config.hidden_size, placement, bias=False)
        self._norm = RMSNorm(config.hidden_size, config.norm_eps, placement)
        self.tower = Tower(config, _PIXTRAL, f"{_PREFIX}transformer.layers", placement)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / config.rope_theta**exponents
        self._frequencies = frequencies[0::2].to(placement.device), frequencies[1::2].to(placement.device)

    def run(self, items: Sequence[MediaInput]) -> Slices:
        """See `MediaEncoder.slices`."""
        patches = [patches_of(in_precision(item.values, self._placement), self._config.patch_size)[0] for item in items]
        lengths = [len(part) * part.shape[1] for part in patches]
        x = self._norm(self._patches(torch.cat([part.flatten(0, 1) for part in patches])))
        places = torch.cat([_places(part.shape[0], part.shape[1], x.device) for part in patches])
        rope = axial_rope(places[:, 0], places[:, 1], *self._frequencies)
        parts = num_parts(tuple(item.values.shape) for item in items)
        x = yield from self.tower.run(x, packed(lengths, x.device, rope), num_parts=parts)
        return list(x.split(lengths))

    def weights(self) -> Iterator[Weight]:
        """The tower's tensors."""
        yield from self._patches.weights(f"{_PREFIX}patch_conv.weight")
        yield from self._norm.weights(f"{_PREFIX}ln_pre")
        yield from self.tower.weights()


class LlavaEncoder:
    """A `MediaEncoder`: the tower, and the projector."""

    sees_ahead = False
    num_deep = 0

    def __init__(self, media: MediaConfig, hidden_size: int, rms_norm_eps: float, placement: Placement) -> None:
        """hidden_size, rms_norm_eps: of the text model."""
        config, floats = media.vision, in_floats(placement)
        is_pixtral = config.tower == "pixtral"
        self._eyes = PixtralEyes(media, placement) if is_pixtral else ClipEyes(media, placement, final_norm=False)
        self._merges = config.merge_size if media.family == "mistral3" else 0
        if self._merges:
            size = config.hidden_size
            self._norm = RMSNorm(size, rms_norm_eps, placement)
            self._merger = Linear(size * self._merges**2, {"merging_layer": size}, floats)
        bias = media.projector_bias
        self._up = Linear(config.hidden_size, {"linear_1": hidden_size}, floats, bias=bias)
        self._down = Linear(hidden_size, {"linear_2": hidden_size}, floats, bias=bias)
        self._activate = activation(media.projector_act)
        self._patch_size = config.patch_size

    @property
    def num_slices(self) -> int:
        """See `MediaEncoder`."""
        return self._eyes.tower.num_slices

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """See `MediaEncoder`. An item's values: [1, channels, height, width]."""
        rows = yield from self._eyes.run(items)
        x = torch.cat([part.flatten(0, -2) for part in rows])
        if self._merges:
            x = self._merged(x, items)
        x = self._down(self._activate(self._up(x)))
        return list(x.split([self._num_rows(part, item) for part, item in zip(rows, items, strict=True)]))

    def _num_rows(self, rows: torch.Tensor, item: MediaInput) -> int:
        if not self._merges:
            return rows.numel() // rows.shape[-1]
        side = self._patch_size * self._merges
        return (item.values.shape[-2] // side) * (item.values.shape[-1] // side)

    def _merged(self, x: torch.Tensor, items: Sequence[MediaInput]) -> torch.Tensor:
        """Squares of neighbouring patches as one row each, element by element: first all patches' first element, and so on."""
        x = self._norm(x)
        sizes = [
            (item.values.shape[-2] // self._patch_size, item.values.shape[-1] // self._patch_size) for item in items
        ]
        merged = []
        for part, (height, width) in zip(x.split([height * width for height, width in sizes]), sizes, strict=True):
            grid = part.view(height, width, -1).permute(2, 0, 1).unsqueeze(0)
            merged.append(patches_of(grid, self._merges)[0].flatten(0, 1))
        return self._merger(torch.cat(merged))

    def weights(self) -> Iterator[Weight]:
        """See `MediaEncoder`."""
        yield from self._eyes.weights()
        if self._merges:
            yield from self._norm.weights(f"{_PROJECTOR}norm")
            yield from self._merger.weights(f"{_PROJECTOR}patch_merger.")
        yield from self._up.weights(_PROJECTOR)
        yield from self._down.weights(_PROJECTOR)

    def fuse(self, native: bool = True) -> str:
        """See `MediaEncoder`."""
        return self._eyes.tower.fuse(native)


def _places(height: int, width: int, device: torch.device) -> torch.Tensor:
    """int64[height * width, 2]: row and column of each patch, row by row."""
    index = torch.arange(height * width, device=device)
    return torch.stack([index // width, index % width], dim=1)
