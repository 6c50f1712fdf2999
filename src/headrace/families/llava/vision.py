"""LLaVA, Pixtral and Mistral 3: a CLIP, SigLIP or Pixtral tower, and two linear layers to the size of the text model. LLaVA-NeXT and
LLaVA-OneVision: the same over an image and over tiles of a larger one, whose rows are put together without the border around it.

Sources: H. Liu et al., "Visual Instruction Tuning" (2023); P. Agrawal et al., "Pixtral 12B" (2024); H. Liu et al., "LLaVA-NeXT"
(2024); B. Li et al., "LLaVA-OneVision" (2024).
"""

from collections.abc import Iterator, Sequence

import torch

from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.linear import Linear
from headrace.layers.norm import RMSNorm
from headrace.layers.weight import Placement, Weight
from headrace.messages.media import num_parts
from headrace.models.media import MediaEncoder, MediaInput, Slices
from headrace.models.tower_parts import Table, in_floats, in_precision, patch_layer, patches_of
from headrace.models.towers import BlockOptions, ClipVision, Tower, TowerEncoder, activation, axial_rope, packed
from headrace.multimodal.resolutions import best_resolution, shrunk, without_border

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
_PREFIX = "vision_tower."
_PROJECTOR = "multi_modal_projector."


class PixtralVision:
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
        patches = [patches_of(in_precision(item.values, self._placement), self._config.patch_size)[0] for item in items]
        lengths = [len(part) * part.shape[1] for part in patches]
        x = self._norm(self._patches(torch.cat([part.flatten(0, 1) for part in patches])))
        places = torch.cat([_places(part.shape[0], part.shape[1], x.device) for part in patches])
        rope = axial_rope(places[:, 0], places[:, 1], *self._frequencies)
        parts = num_parts(tuple(item.values.shape) for item in items)
        x = yield from self.tower.run(x, packed(lengths, x.device, rope), num_parts=parts)
        return list(x.split(lengths))

    def weights(self) -> Iterator[Weight]:
        yield from self._patches.weights(f"{_PREFIX}patch_conv.weight")
        yield from self._norm.weights(f"{_PREFIX}ln_pre")
        yield from self.tower.weights()


def encoder(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    made = _TiledEncoder if media.pinpoints else _Encoder
    return made(media, config.hidden_size, config.rms_norm_eps, placement)


class _Encoder(TowerEncoder):
    def __init__(self, media: MediaConfig, hidden_size: int, rms_norm_eps: float, placement: Placement) -> None:
        """hidden_size, rms_norm_eps: of the text model."""
        config, floats = media.vision, in_floats(placement)
        is_pixtral = config.tower == "pixtral"
        self._vision = PixtralVision(media, placement) if is_pixtral else ClipVision(media, placement, final_norm=False)
        self.tower = self._vision.tower
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

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """An item's values: [1, channels, height, width]."""
        rows = yield from self._vision.run(items)
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
        yield from self._vision.weights()
        if self._merges:
            yield from self._norm.weights(f"{_PROJECTOR}norm")
            yield from self._merger.weights(f"{_PROJECTOR}patch_merger.")
        yield from self._up.weights(_PROJECTOR)
        yield from self._down.weights(_PROJECTOR)


class _TiledEncoder(_Encoder):
    def __init__(self, media: MediaConfig, hidden_size: int, rms_norm_eps: float, placement: Placement) -> None:
        super().__init__(media, hidden_size, rms_norm_eps, placement)
        self._line_end = Table((hidden_size,), placement)
        self._media = media

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """An item's values: [1 + tiles, channels, side, side], first the whole image; its grid has the image's own size. Without
        tiles there is one row at the end of the whole image."""
        rows = yield from super().slices(items)
        return [self._joined(part, item) for part, item in zip(rows, items, strict=True)]

    def _joined(self, x: torch.Tensor, item: MediaInput) -> torch.Tensor:
        """[(1 + tiles) * patches of a tile, size] -> the rows of the whole image, and of the larger one line by line, each with a row at its end."""
        line_end = self._line_end.rows.to(x.dtype)
        if len(item.values) == 1:
            return torch.cat([x, line_end.unsqueeze(0)])
        vision = self._media.vision
        side, (_, height, width) = vision.image_size // vision.patch_size, item.grid
        tall, wide = (each // vision.image_size for each in best_resolution(height, width, self._media.pinpoints))
        whole, tiles = x.split([side**2, tall * wide * side**2])
        large = tiles.view(tall, wide, side, side, -1).transpose(1, 2).reshape(tall * side, wide * side, -1)
        rows, columns = without_border(height, width, *large.shape[:2])
        top, left = (large.shape[0] - rows) // 2, (large.shape[1] - columns) // 2
        large = large[top : top + rows, left : left + columns]
        fewer = shrunk(rows, columns, self._media.max_tiles * side**2)
        if fewer != (rows, columns):
            planes = large.permute(2, 0, 1).unsqueeze(0).float()
            large = (
                torch.nn.functional.interpolate(planes, list(fewer), mode="bilinear")[0].permute(1, 2, 0).to(x.dtype)
            )
        lines = torch.cat([large, line_end.expand(len(large), 1, -1)], dim=1)
        return torch.cat([whole, lines.flatten(0, 1)])

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        yield from self._line_end.weights("image_newline")


def _places(height: int, width: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(height * width, device=device)
    return torch.stack([index // width, index % width], dim=1)
