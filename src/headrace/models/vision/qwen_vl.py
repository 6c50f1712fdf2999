"""Qwen2-VL and Qwen2.5-VL: a tower over patches of images of any size, with rotary positions, and a layer that merges squares of patches.

Owns the families' order of parts and their names. Patches come in the order of the squares that are merged. Runs in the thread that runs the model.

Sources: P. Wang et al., "Qwen2-VL" (2024); S. Bai et al., "Qwen2.5-VL Technical Report" (2025), with attention in windows.
"""

from collections.abc import Iterator, Sequence

import torch

from headrace import kernels
from headrace.checkpoint.media_config import MediaConfig
from headrace.layers.linear import Linear
from headrace.layers.weight import Placement, Weight
from headrace.models.media import MediaInput, Slices
from headrace.models.vision.blocks import BlockOptions, in_floats, vision_norm
from headrace.models.vision.llava import in_precision
from headrace.models.vision.patches import patch_layer
from headrace.models.vision.tower import Tower, axial_rope, packed

_QWEN2 = BlockOptions(
    attention_norm="norm1", qkv=("attn.qkv",), out="attn.proj", mlp_norm="norm2", up=("mlp.fc1",), down="mlp.fc2"
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


class QwenVlEncoder:
    """A `MediaEncoder`."""

    sees_ahead = False

    def __init__(self, media: MediaConfig, placement: Placement) -> None:
        config = self._config = media.vision
        size, merged = config.hidden_size, config.hidden_size * config.merge_size**2
        options = _QWEN2_5 if config.tower == "qwen2_5_vl" else _QWEN2
        kernel = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self._placement = placement
        self._patches = patch_layer(kernel, size, placement, bias=False)
        self._tower = Tower(config, options, "visual.blocks", placement)
        self._norm = vision_norm(config, options.rms, placement)
        floats = in_floats(placement)
        self._up = Linear(merged, {"0": merged}, floats, bias=True)
        self._down = Linear(merged, {"2": config.out_size}, floats, bias=True)
        exponents = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32) / (config.head_dim // 2)
        self._frequencies = (1.0 / config.rope_theta**exponents).to(placement.device)

    @property
    def num_slices(self) -> int:
        """See `MediaEncoder`."""
        return self._tower.num_slices

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """See `MediaEncoder`. An item's values: [patches, values of a patch], with a grid of patches."""
        config, unit = self._config, self._config.merge_size**2
        x = self._patches(in_precision(torch.cat([item.values for item in items]), self._placement))
        places = torch.cat([_places(*item.grid, config.merge_size) for item in items])
        frames = [height * width for time, height, width in (item.grid for item in items) for _ in range(time)]
        if not config.window_size:
            images = packed(frames, x.device, self._rope(places))
            x = yield from self._tower.run(x, images)
            order = None
        else:
            order, lengths = _windows(
                [item.grid for item in items], config.window_size // config.patch_size, config.merge_size
            )
            patch_order = (order[:, None] * unit + torch.arange(unit)).flatten()
            x = x[patch_order.to(x.device)]
            rope = self._rope(places[patch_order])
            windows = packed([length * unit for length in lengths], x.device, rope)
            # Windows are cut within a frame, so that frames stay together.
            x = yield from self._tower.run(x, packed(frames, x.device, rope), windows)
        x = self._norm(x).view(-1, unit * config.hidden_size)
        x = self._down(kernels.gelu(self._up(x)))
        if order is not None:
            x = x[order.argsort().to(x.device)]
        return list(x.split([len(item.values) // unit for item in items]))

    def _rope(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = places.to(self._placement.device)
        return axial_rope(places[:, 0], places[:, 1], self._frequencies, self._frequencies)

    def weights(self) -> Iterator[Weight]:
        """See `MediaEncoder`."""
        yield from self._patches.weights("visual.patch_embed.proj.weight")
        yield from self._tower.weights()
        yield from self._norm.weights("visual.merger.ln_q")
        yield from self._up.weights("visual.merger.mlp.")
        yield from self._down.weights("visual.merger.mlp.")

    def fuse(self) -> str:
        """See `MediaEncoder`."""
        return self._tower.fuse()


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
