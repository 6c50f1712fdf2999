"""Qwen2-Audio: two convolutions over log-mel frames, Whisper's layers, means over pairs of positions, and a product to the size of the text model.

Sources: A. Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022); Y. Chu et al., "Qwen2-Audio Technical Report" (2024).
"""

from collections.abc import Iterator, Sequence

import torch

from headrace import kernels
from headrace.checkpoint.media_config import AudioConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm
from headrace.layers.weight import Placement, Weight
from headrace.messages.media import num_parts
from headrace.models.media import MediaEncoder, MediaInput, Slices
from headrace.models.tower_parts import ReshapedLinear, Table, in_floats, in_precision
from headrace.models.towers import BlockOptions, Tower, TowerEncoder, packed

_WHISPER = BlockOptions(
    attention_norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    unbiased=("self_attn.k_proj",),
    out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
)
_KERNEL = 3
"""Frames that each convolution reads for one that it gives."""

_TOWER = "audio_tower."


def encoder(audio: AudioConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    return Qwen2AudioEncoder(audio, config.hidden_size, placement)


class Qwen2AudioEncoder(TowerEncoder):
    """A `MediaEncoder`. transformers pads every sound to the longest, and masks what is padding. Positions of the sound see only each other, so no
    others are computed."""

    def __init__(self, audio: AudioConfig, hidden_size: int, placement: Placement) -> None:
        size = audio.tower.hidden_size
        self._max_positions = audio.max_positions
        self._placement = placement
        self._first = _convolution(audio.num_mel_bins, size, placement)
        self._second = _convolution(size, size, placement)
        self._positions = Table((audio.max_positions, size), placement)
        self.tower = Tower(audio.tower, _WHISPER, f"{_TOWER}layers", placement)
        self._norm = LayerNorm(size, audio.tower.norm_eps, placement)
        self._projector = Linear(size, {"linear": hidden_size}, in_floats(placement), bias=True)

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """An item's values: the log-mel frames [frames, num_mel_bins] that its positions depend on, two for each and the one
        after them, if the longest sound has it. grid: (positions, 1, 1). Two positions give a row; an odd last one is only seen by the others."""
        lengths = [item.grid[0] for item in items]
        x = torch.cat(self._embedded(items, lengths))
        parts = num_parts(tuple(item.values.shape) for item in items)
        x = yield from self.tower.run(x, packed(lengths, x.device), num_parts=parts)
        means = [_means(part) for part in x.split(lengths)]
        rows = self._projector(self._norm(torch.cat(means)))
        return list(rows.split([len(part) for part in means]))

    def _embedded(self, items: Sequence[MediaInput], lengths: list[int]) -> list[torch.Tensor]:
        """What the first layer takes of each item, [positions, hidden_size]."""
        windows = [self._windows(item, length) for item, length in zip(items, lengths, strict=True)]
        frames = kernels.gelu(self._first(torch.cat(windows)))
        pairs = [_every_second(part) for part in frames.split([len(part) for part in windows])]
        x = kernels.gelu(self._second(torch.cat(pairs)))
        return [part + self._positions.rows[: len(part)].to(x.dtype) for part in x.split(lengths)]

    def _windows(self, item: MediaInput, length: int) -> torch.Tensor:
        """[2 * length, 3 * num_mel_bins]: each frame with those beside it, and zeros before the first and after the last of the longest sound."""
        num_frames = min(2 * length + 1, 2 * self._max_positions)
        assert 0 < length <= self._max_positions, item.grid
        assert len(item.values) == num_frames, (item.values.shape, item.grid)
        frames = in_precision(item.values, self._placement)
        silence = frames.new_zeros(1, frames.shape[1])
        around = torch.cat([silence, frames, silence[: 2 * length + 1 - num_frames]])
        return torch.cat([around[:-2], around[1:-1], around[2:]], dim=1)

    def weights(self) -> Iterator[Weight]:
        yield from self._first.weights(f"{_TOWER}conv1.weight", f"{_TOWER}conv1.bias")
        yield from self._second.weights(f"{_TOWER}conv2.weight", f"{_TOWER}conv2.bias")
        yield from self._positions.weights(f"{_TOWER}embed_positions.weight")
        yield from self.tower.weights()
        yield from self._norm.weights(f"{_TOWER}layer_norm")
        yield from self._projector.weights("multi_modal_projector.")


def _convolution(in_size: int, out_size: int, placement: Placement) -> ReshapedLinear:
    """A convolution over frames as a product: of three frames, one after the other."""
    return ReshapedLinear(
        _KERNEL * in_size,
        out_size,
        (out_size, in_size, _KERNEL),
        lambda tensor: tensor.transpose(1, 2).flatten(1),
        lambda matrix: matrix.unflatten(1, (_KERNEL, in_size)).transpose(1, 2).contiguous(),
        placement,
        bias=True,
    )


def _every_second(x: torch.Tensor) -> torch.Tensor:
    """[2 * length, size] -> [length, 3 * size]: each even row between those beside it, and zeros before the first."""
    before = torch.cat([x.new_zeros(1, x.shape[1]), x[1:-1:2]])
    return torch.cat([before, x[0::2], x[1::2]], dim=1)


def _means(x: torch.Tensor) -> torch.Tensor:
    """[length, size] -> [length / 2, size]: of each pair of rows."""
    pairs = x[: len(x) // 2 * 2].unflatten(0, (-1, 2))
    return (pairs[:, 0] + pairs[:, 1]) / 2
