"""LLaVA-NeXT and LLaVA-OneVision: a tower over an image and over tiles of a larger one, whose rows are put together without the border around it.

Owns the families' order of parts and their names. Runs in the thread that runs the model.

Sources: B. Li et al., "LLaVA-OneVision" (2024); H. Liu et al., "LLaVA-NeXT" (2024), for the tiles.
"""

from collections.abc import Iterator, Sequence

import torch

from headrace.checkpoint.media_config import MediaConfig
from headrace.layers.weight import Placement, Weight
from headrace.models.media import MediaInput, Slices
from headrace.models.towers.table import Table
from headrace.models.vision.llava import LlavaEncoder
from headrace.multimodal.resolutions import best_resolution, shrunk, without_border


class LlavaOnevisionEncoder(LlavaEncoder):
    """A `MediaEncoder`."""

    def __init__(self, media: MediaConfig, hidden_size: int, rms_norm_eps: float, placement: Placement) -> None:
        """hidden_size, rms_norm_eps: of the text model."""
        super().__init__(media, hidden_size, rms_norm_eps, placement)
        self._line_end = Table((hidden_size,), placement)
        self._media = media

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """See `MediaEncoder`. An item's values: [1 + tiles, channels, side, side], first the whole image; its grid has the image's own size. Without
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
        """See `MediaEncoder`."""
        yield from super().weights()
        yield from self._line_end.weights("image_newline")
