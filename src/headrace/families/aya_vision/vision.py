"""Aya Vision: a SigLIP tower over square tiles of an image, whose neighbouring patches become one row, a norm, and a gated layer.

Owns the family's order of parts and their names. Runs in the thread that runs the model.

Source: S. Dash et al., "Aya Vision: Advancing the Frontier of Multilingual Multimodality" (2025).
"""

from collections.abc import Iterator, Sequence

import torch

from headrace import kernels
from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.media_keys import MediaKeys
from headrace.checkpoint.model_config import ModelConfig
from headrace.families.aya_vision import projector_sizes
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm
from headrace.layers.weight import Placement, Weight
from headrace.models.media import MediaEncoder, MediaInput, Slices
from headrace.models.towers.blocks import in_floats
from headrace.models.towers.clip import ClipEyes
from headrace.models.towers.patches import shuffled

_PROJECTOR = "multi_modal_projector."


def encoder(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    """See `families.Vision`."""
    sizes = projector_sizes(MediaKeys(config.around, "config.json"), config.hidden_size)
    return _Encoder(media, config.hidden_size, *sizes, placement)


class _Encoder:
    """A `MediaEncoder`."""

    sees_ahead = False
    num_deep = 0

    def __init__(self, media: MediaConfig, hidden_size: int, inner: int, eps: float, placement: Placement) -> None:
        """hidden_size: of the text model. inner: elements between the projector's layers. eps: of its norm."""
        merged, floats = media.vision.hidden_size * media.shuffle**2, in_floats(placement)
        self._shuffle = media.shuffle
        self._eyes = ClipEyes(media, placement, final_norm=False)
        self._norm = LayerNorm(merged, eps, placement)
        self._up = Linear(merged, {"linear_1": inner}, floats, bias=True)
        self._down = Linear(inner // 2, {"linear_2": hidden_size}, floats, bias=True)

    @property
    def num_slices(self) -> int:
        """See `MediaEncoder`."""
        return self._eyes.tower.num_slices

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """See `MediaEncoder`. An item's values: [tiles, channels, height, width]; its rows are those of the tiles, one after the other."""
        tiles = yield from self._eyes.run(items)
        rows = [shuffled(part, self._shuffle) for part in tiles]
        factors, gates = self._up(self._norm(torch.cat(rows))).chunk(2, dim=1)
        x = self._down(kernels.silu_mul(torch.cat([gates, factors], dim=1)))
        return list(x.split([len(part) for part in rows]))

    def weights(self) -> Iterator[Weight]:
        """See `MediaEncoder`."""
        yield from self._eyes.weights()
        yield from self._norm.weights(f"{_PROJECTOR}layernorm")
        yield from self._up.weights(_PROJECTOR)
        yield from self._down.weights(_PROJECTOR)

    def fuse(self, native: bool = True) -> str:
        """See `MediaEncoder`."""
        return self._eyes.tower.fuse(native)
