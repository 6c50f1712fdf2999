"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a tower over patches of images of any size, with rotary positions, and a layer that merges squares of patches.

Patches come in the order of the squares that are merged.

Sources: P. Wang et al., "Qwen2-VL" (2024); S. Bai et al., "Qwen2.5-VL Technical Report" (2025), with attention in windows;
Qwen Team, "Qwen3-VL Technical Report" (2025), with learnt positions besides, and with rows for the text model's first layers.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from headrace import kernels
from headrace.checkpoint.media_config import MediaConfig, VisionConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.errors import ModelError
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm, RMSNorm
from headrace.layers.weight import Placement, Weight
from headrace.messages.media import num_parts
from headrace.models.media import MediaEncoder, MediaInput, Slices
from headrace.models.tower_parts import Table, in_floats, in_precision, patch_layer
from headrace.models.towers import BlockOptions, Tower, TowerEncoder, axial_rope, packed

_QWEN2 = BlockOptions(
    attention_norm="norm1", qkv=("attn.qkv",), out="attn.proj", mlp_norm="norm2", up=("mlp.fc1",), down="mlp.fc2"
)
_QWEN3 = BlockOptions(
    attention_norm="norm1",
    qkv=("attn.qkv",),
    out="attn.proj",
    mlp_norm="norm2",
    up=("mlp.linear_fc1",),
    down="mlp.linear_fc2",
)
_QWEN2_5 = BlockOptions(
    attention_norm="norm1",
    qkv=("attn.qkv",),
    out="attn.proj",
    mlp_norm="norm2",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    rms=True,
)


class _Merger:
    """A norm over patches, or over the squares of them, and two linear layers over squares."""

    def __init__(
        self, config: VisionConfig, placement: Placement, names: tuple[str, str, str], of_squares: bool
    ) -> None:
        """names: of the norm and of the two layers."""
        self._size = config.hidden_size * config.merge_size**2
        self._names = names
        self._of_squares = of_squares
        norm_size = self._size if of_squares else config.hidden_size
        rms = config.tower == "qwen2_5_vl"
        self._norm = (RMSNorm if rms else LayerNorm)(norm_size, config.norm_eps, placement)
        floats = in_floats(placement)
        self._up = Linear(self._size, {names[1]: self._size}, floats, bias=True)
        self._down = Linear(self._size, {names[2]: config.out_size}, floats, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[patches, hidden_size] -> [squares, out_size]."""
        x = self._norm(x.view(-1, self._size)) if self._of_squares else self._norm(x).view(-1, self._size)
        return self._down(kernels.gelu(self._up(x)))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self._norm.weights(f"{prefix}{self._names[0]}")
        yield from self._up.weights(prefix)
        yield from self._down.weights(prefix)


def encoder(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    """See `families.Vision`. Raises ModelError if its rows are not of the size of the text model."""
    if media.vision.out_size != config.hidden_size:
        raise ModelError(
            f"the vision tower gives {media.vision.out_size} elements, but the text model takes {config.hidden_size}"
        )
    return _Encoder(media, placement)


class _Encoder(TowerEncoder):
    def __init__(self, media: MediaConfig, placement: Placement) -> None:
        config = self._config = media.vision
        is_third = config.tower == "qwen3_vl"
        options = _QWEN3 if is_third else _QWEN2_5 if config.tower == "qwen2_5_vl" else _QWEN2
        kernel = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self._placement = placement
        self._patches = patch_layer(kernel, config.hidden_size, placement, bias=is_third)
        self._positions = Table((config.num_positions, config.hidden_size), placement) if is_third else None
        self.tower = Tower(config, options, "visual.blocks", placement)
        names = ("norm", "linear_fc1", "linear_fc2") if is_third else ("ln_q", "mlp.0", "mlp.2")
        self._merger = _Merger(config, placement, names, of_squares=False)
        self._deep = {layer: _Merger(config, placement, names, of_squares=True) for layer in config.deep_layers}
        self.num_deep = len(self._deep)
        exponents = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32) / (config.head_dim // 2)
        self._frequencies = (1.0 / config.rope_theta**exponents).to(placement.device)

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """An item's values: [patches, values of a patch], or of a video [steps, patches, values]; with a grid of patches."""
        config, unit = self._config, self._config.merge_size**2
        x = self._patches(in_precision(torch.cat([item.values.flatten(0, -2) for item in items]), self._placement))
        if self._positions is not None:
            x = x + torch.cat([self._learnt(item.grid) for item in items]).to(x.dtype)
        places = torch.cat([_places(*item.grid, config.merge_size) for item in items])
        frames = [height * width for time, height, width in (item.grid for item in items) for _ in range(time)]
        deep: dict[int, torch.Tensor] = {}
        parts = num_parts(tuple(item.values.shape) for item in items)
        order = None
        if not config.window_size:
            images = packed(frames, x.device, self._rope(places))
            x = yield from self.tower.run(x, images, tap=self._taps(deep), num_parts=parts)
        else:
            window = config.window_size // config.patch_size
            order, lengths = _windows([item.grid for item in items], window, config.merge_size)
            patch_order = (order[:, None] * unit + torch.arange(unit)).flatten()
            x = x[patch_order.to(x.device)]
            rope = self._rope(places[patch_order])
            windows = packed([length * unit for length in lengths], x.device, rope)
            # Windows are cut within a frame, so that frames stay together.
            x = yield from self.tower.run(x, packed(frames, x.device, rope), windows, num_parts=parts)
        x = torch.cat([self._merger(x), *(deep[layer] for layer in self._deep)], dim=1)
        if order is not None:
            x = x[order.argsort().to(x.device)]
        return list(x.split([math.prod(item.grid) // unit for item in items]))

    def _taps(self, deep: dict[int, torch.Tensor]) -> Callable[[int, torch.Tensor], None]:
        def tap(layer: int, x: torch.Tensor) -> None:
            if layer in self._deep:
                deep[layer] = self._deep[layer](x)

        return tap

    def _learnt(self, grid: tuple[int, int, int]) -> torch.Tensor:
        """[patches, hidden_size]: the table of a square, stretched over the image (bilinear, corner to corner), square by square."""
        assert self._positions is not None
        time, height, width = grid
        side = int(self._config.num_positions**0.5)
        total: torch.Tensor | None = None
        place = _places(1, height, width, self._config.merge_size)
        for rows, row_shares in _stretched(place[:, 0], height, side):
            for columns, column_shares in _stretched(place[:, 1], width, side):
                at, share = (rows * side + columns).to(self._placement.device), row_shares * column_shares
                part = self._positions.rows[at] * share[:, None].to(self._placement.device)
                total = part if total is None else total + part
        assert total is not None
        return total.repeat(time, 1)

    def _rope(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = places.to(self._placement.device)
        return axial_rope(places[:, 0], places[:, 1], self._frequencies, self._frequencies)

    def weights(self) -> Iterator[Weight]:
        yield from self._patches.weights("visual.patch_embed.proj.weight", "visual.patch_embed.proj.bias")
        if self._positions is not None:
            yield from self._positions.weights("visual.pos_embed.weight")
        yield from self.tower.weights()
        yield from self._merger.weights("visual.merger.")
        for index, merger in enumerate(self._deep.values()):
            yield from merger.weights(f"visual.deepstack_merger_list.{index}.")


def _stretched(places: torch.Tensor, length: int, side: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The two entries of a table of `side` that are nearest to each place of so many, with their shares."""
    exact = places.float() * (side - 1) / max(1, length - 1)
    below = exact.floor()
    return [
        ((below.long() + offset).clamp(0, side - 1), (1 - (exact - below - offset).abs()).clamp(min=0))
        for offset in (0, 1)
    ]


def _places(time: int, height: int, width: int, merge: int) -> torch.Tensor:
    """int64[time * height * width, 2]: row and column of each patch, square by square."""
    index = torch.arange(height * width).view(height // merge, merge, width // merge, merge).transpose(1, 2).flatten()
    return torch.stack([index // width, index % width], dim=1).repeat(time, 1)


def _windows(grids: Sequence[tuple[int, int, int]], window: int, merge: int) -> tuple[torch.Tensor, list[int]]:
    """The squares of all images window by window, and how many each window has. window: patches of its side."""
    side, first = window // merge, 0
    order: list[torch.Tensor] = []
    for time, height, width in grids:
        rows, columns = height // merge, width // merge
        squares = (torch.arange(time * rows * columns) + first).view(time, rows, columns)
        for frame in squares:
            for top in frame.split(side):
                order += [part.flatten() for part in top.split(side, dim=1)]
        first += time * rows * columns
    return torch.cat(order), [len(part) for part in order]
