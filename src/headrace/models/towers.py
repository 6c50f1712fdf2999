"""Encoders of images and of sounds: their layers, over the tokens of several items that are packed one after the other without padding, where work
stops between them, and the whole of a CLIP or SigLIP tower. What else is before the first layer and after the last one has each family's file.

Runs in the thread that runs the model. Sources: A. Dosovitskiy et al., "An Image is Worth 16x16 Words" (ViT, 2020); A. Radford et al., "Learning
Transferable Visual Models From Natural Language Supervision" (CLIP, 2021); X. Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2023).
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch

from headrace import kernels
from headrace.checkpoint.media_config import MediaConfig, TowerConfig
from headrace.kernels import EncoderLayerSpec, EncoderSpec, FusedEncoder
from headrace.kernels.encoder import why_not
from headrace.layers.linear import Linear
from headrace.layers.mlp import ACTIVATIONS, FUNCTIONS
from headrace.layers.norm import LayerNorm, RMSNorm
from headrace.layers.weight import NamedLayer, Placement, Weight
from headrace.messages.media import num_parts
from headrace.models.media import MediaInput, Slices
from headrace.models.tower_parts import Table, in_precision, patch_layer, patches_of

_QUICK = 1.702
"""Of the sigmoid form of gelu (D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units", 2016)."""


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(1.702 x) of each element of [rows, size], by the kernel of silu, so that the bits depend on the element alone."""
    scaled = torch.cat([x * _QUICK, x.new_full(x.shape, 1 / _QUICK)], dim=1)
    return kernels.silu_mul(scaled)


_ATTENTION_SHARE = 0.7
"""Of the work of a layer on a large item, what its attention takes with the products around it: 0.75 in int8, 0.65 in bfloat16, of 4,096 tokens
of SigLIP's larger tower."""

_ROWS = 1024
"""That the feed-forward layer of a large item takes at a time, so that what lies between its products stays in the cache."""


def activation(name: str, gated: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """[rows, size] -> the same; gated: [rows, 2 * size] -> [rows, size]. name: one of `config_keys.ACTIVATIONS`, or of those of gated layers."""
    return quick_gelu if name == "quick_gelu" else FUNCTIONS[ACTIVATIONS.get(name), gated]


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """Differences between towers. Names are those of a layer's tensors.

    qkv: the projections, or the one that stacks them. up: one name, or two of a gated layer, that which is activated first. rms: norms are RMSNorms.
    bias: of all linear layers; qkv_bias: of those of q, k and v, None = as the others; unbiased: those of `qkv` without one all the same. scales:
    names of factors on what attention and the feed-forward layer give, element by element; "" = there are none.
    """

    attention_norm: str
    qkv: tuple[str, ...]
    out: str
    mlp_norm: str
    up: tuple[str, ...]
    down: str
    rms: bool = False
    bias: bool = True
    qkv_bias: bool | None = None
    unbiased: tuple[str, ...] = ()
    scales: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class PackedItems:
    """Where the tokens of items that lie one after the other are.

    row_starts: int32[num_items + 1] on the CPU; a token sees those between two of them. rope: cos, sin float32[tokens, head_dim / 2] by which q
    and k are rotated, None = they are not. positions: int32[tokens], 0, 1, ...: the rows of `rope`.
    """

    row_starts: torch.Tensor
    positions: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor] | None = None


class TowerBlock:
    """Attention in both directions within an item, and a feed-forward layer, each after a norm and with a residual."""

    def __init__(self, config: TowerConfig, options: BlockOptions, placement: Placement) -> None:
        size, width = config.hidden_size, config.num_heads * config.head_dim
        outputs = dict.fromkeys(options.qkv, 3 * width // len(options.qkv))
        qkv_bias = options.bias if options.qkv_bias is None else options.qkv_bias
        self._qkv = Linear(size, outputs, placement, bias=qkv_bias, unbiased=options.unbiased)
        self._out = Linear(width, {options.out: size}, placement, bias=options.bias)
        self._up = Linear(size, dict.fromkeys(options.up, config.intermediate_size), placement, bias=options.bias)
        self._down = Linear(config.intermediate_size, {options.down: size}, placement, bias=options.bias)
        norm = RMSNorm if options.rms else LayerNorm
        self._attention_norm, self._mlp_norm = (norm(size, config.norm_eps, placement) for _ in range(2))
        self._activate = activation(config.hidden_act, gated=len(options.up) > 1)
        self._scales = [Table((size,), placement) for name in options.scales if name]
        self._options = options
        self._config = config
        self._fused: FusedEncoder | None = None

    def __call__(self, x: torch.Tensor, items: PackedItems) -> torch.Tensor:
        """x [tokens, hidden_size], which it may overwrite -> the same shape."""
        if self._fused is not None and self.is_one_call(items):
            return self._fused(x, items.positions, items.row_starts)
        q, k, v = self._projected(self._attention_norm(x), items)
        x = x + self._scaled(0, self._out(self._attended(q, k, v, items).flatten(1)))
        return x + self._scaled(1, self._fed_forward(x))

    def in_parts(self, x: torch.Tensor, items: PackedItems, num_parts: int) -> Generator[None, None, torch.Tensor]:
        """The same with the same bits, stopping between parts of about the same work, so many or fewer, but two at least: some heads after the
        others, then some rows after the others."""
        num_attention = max(1, min(round(num_parts * _ATTENTION_SHARE), num_parts - 1))
        q, k, v = self._projected(self._attention_norm(x), items)
        attended: list[torch.Tensor] = []
        for heads in _cut(self._config.num_heads, num_attention):
            if attended:
                yield
            attended.append(self._attended(q[:, heads], k[:, heads], v[:, heads], items))
        x = x + self._scaled(0, self._out(torch.cat(attended, dim=1).flatten(1)))
        for rows in _cut(len(x), num_parts - num_attention):
            yield
            for part in x[rows].split(_ROWS):
                part += self._scaled(1, self._fed_forward(part))
        return x

    def is_one_call(self, items: PackedItems) -> bool:
        """Whether it is computed in one native call, which goes over the tokens in parts by itself."""
        return self._fused is not None and items.rope is None

    def _scaled(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return x * self._scales[index].rows.to(x.dtype) if self._scales else x

    def _projected(self, x: torch.Tensor, items: PackedItems) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = self._config.num_heads
        q, k, v = self._qkv(x).unflatten(1, (3 * heads, self._config.head_dim)).split(heads, dim=1)
        if items.rope is not None:
            kernels.rotary(q, k, items.positions, *items.rope)
        return q, k, v

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, items: PackedItems) -> torch.Tensor:
        rounded = kernels.rounds_attention(self._qkv.packed)
        return kernels.packed_attention(q, k, v, items.row_starts, self._config.head_dim**-0.5, rounded=rounded)

    def _fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._activate(self._up(self._mlp_norm(x))))

    def fuse(self, native: bool = True) -> str:
        self._fused = None
        if not native:
            return "another implementation is preferred"
        config, options = self._config, self._options
        if not isinstance(self._attention_norm, LayerNorm) or not isinstance(self._mlp_norm, LayerNorm):
            return "its norms are RMSNorms"
        if self._scales:
            return "it has factors on what its parts give"
        act = ACTIVATIONS.get(config.hidden_act)
        if len(options.up) > 1 or act is None:
            return f"there is no kernel for {config.hidden_act}"
        layer = EncoderLayerSpec(
            qkv=self._qkv.packed,
            out=self._out.packed,
            up=self._up.packed,
            down=self._down.packed,
            attention_norm=self._attention_norm.parameters,
            mlp_norm=self._mlp_norm.parameters,
        )
        spec = EncoderSpec(
            layers=(layer,),
            pre_norm=True,
            final_norm=None,
            eps=config.norm_eps,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            activation=act,
            gated=False,
        )
        if reason := why_not(spec):
            return reason
        self._fused = FusedEncoder(spec)
        return ""

    def weights(self, prefix: str) -> Iterator[Weight]:
        options = self._options
        yield from self._attention_norm.weights(f"{prefix}{options.attention_norm}")
        yield from self._qkv.weights(prefix)
        yield from self._out.weights(prefix)
        yield from self._mlp_norm.weights(f"{prefix}{options.mlp_norm}")
        yield from self._up.weights(prefix)
        yield from self._down.weights(prefix)
        for name, scale in zip(options.scales, self._scales, strict=False):
            yield from scale.weights(f"{prefix}{name}")


def _cut(length: int, num_parts: int) -> list[slice]:
    """0 .. length - 1 in so many parts that are about equal, or in fewer, none of them empty."""
    num_parts = min(num_parts, length)
    return [slice(length * i // num_parts, length * (i + 1) // num_parts) for i in range(num_parts)]


MAX_TOKENS = 4096
"""A layer computes items together while they have at most this many tokens: what lies between its parts takes much more memory than its input."""


class Tower:
    def __init__(self, config: TowerConfig, options: BlockOptions, layers: str, placement: Placement) -> None:
        self.config = config
        self._layers = layers
        self._blocks = [TowerBlock(config, options, placement) for _ in range(config.num_layers)]

    @property
    def num_slices(self) -> int:
        return len(self._blocks)

    def run(
        self,
        x: torch.Tensor,
        items: PackedItems,
        windows: PackedItems | None = None,
        tap: Callable[[int, torch.Tensor], None] = lambda layer, x: None,
        num_parts: int = 1,
    ) -> Generator[None, None, torch.Tensor]:
        """All layers over x [tokens, hidden_size], which it may overwrite, stopping after each. Returns the same shape.

        windows: what a token sees in layers that are not in the config's `full_layers`; None = all of its item.
        tap: called after each layer with its number and what it gives. num_parts: into which each layer's work is cut, with a stop after each:
        between items, or, if they are fewer, within the layer.
        """
        for index, block in enumerate(self._blocks):
            seen = items if windows is None or index in self.config.full_layers else windows
            if num_parts == 1:
                x = _computed(block, x, seen)
            elif num_parts <= len(seen.row_starts) - 1:
                for number, (tokens, piece) in enumerate(pieces_of(seen, num_parts)):
                    if number:
                        yield
                    y = _computed(block, x[tokens], piece)
                    if y.data_ptr() != x[tokens].data_ptr():  # else it is in place
                        x[tokens] = y
            else:
                x = yield from _with_stops(block.in_parts(x, seen, num_parts), num_parts - 1)
            tap(index, x)
            yield
        return x

    def fuse(self, native: bool = True) -> str:
        reasons = [block.fuse(native) for block in self._blocks]
        return next((reason for reason in reasons if reason), "")

    def weights(self) -> Iterator[Weight]:
        for index, block in enumerate(self._blocks):
            yield from block.weights(f"{self._layers}.{index}.")


def _with_stops(work: Generator[None, None, torch.Tensor], num_stops: int) -> Generator[None, None, torch.Tensor]:
    """The work, which stops as often or less often, with exactly so many stops."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            yield from repeat(None, num_stops)
            x: torch.Tensor = done.value
            return x
        num_stops -= 1
        yield


def pieces_of(items: PackedItems, num_pieces: int) -> list[tuple[slice, PackedItems]]:
    """Neighbouring items in so many pieces, with the tokens that are theirs."""
    count = len(items.row_starts) - 1
    assert num_pieces <= max(1, count), (num_pieces, count)
    return [_some(items, count * i // num_pieces, count * (i + 1) // num_pieces) for i in range(num_pieces)]


def _some(items: PackedItems, first: int, last: int) -> tuple[slice, PackedItems]:
    """Items first .. last - 1, and the tokens that are theirs."""
    starts = items.row_starts[first : last + 1]
    tokens = slice(int(starts[0]), int(starts[-1]))
    rope = None if items.rope is None else (items.rope[0][tokens], items.rope[1][tokens])
    return tokens, PackedItems(starts - starts[0], items.positions[: tokens.stop - tokens.start], rope)


def _computed(block: TowerBlock, x: torch.Tensor, items: PackedItems) -> torch.Tensor:
    """A layer over x, which it may overwrite, a few of the items at a time where that takes less memory."""
    if len(x) <= MAX_TOKENS or block.is_one_call(items):
        return block(x, items)
    starts: list[int] = items.row_starts.tolist()
    first = 0
    for last in range(1, len(starts)):
        if last + 1 == len(starts) or starts[last + 1] - starts[first] > MAX_TOKENS:
            tokens, some = _some(items, first, last)
            x[tokens] = block(x[tokens], some)
            first = last
    return x


def packed(
    lengths: list[int], device: torch.device, rope: tuple[torch.Tensor, torch.Tensor] | None = None
) -> PackedItems:
    """Items of so many tokens each; those without any are left out. rope: see `PackedItems`."""
    starts = [0]
    for length in lengths:
        if length:
            starts.append(starts[-1] + length)
    positions = torch.arange(starts[-1], dtype=torch.int32, device=device)
    return PackedItems(torch.tensor(starts, dtype=torch.int32), positions, rope)


def axial_rope(
    rows: torch.Tensor, columns: torch.Tensor, row_frequencies: torch.Tensor, column_frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32[tokens, head_dim / 2], of patches at these places: half of the pairs turn by the row, half by the column. rows, columns:
    [tokens]. row_frequencies, column_frequencies: float32[head_dim / 4], radians for a patch."""
    angles = torch.cat([rows[:, None].float() * row_frequencies, columns[:, None].float() * column_frequencies], dim=1)
    return angles.cos(), angles.sin()


_CLIP_BLOCKS = BlockOptions(
    attention_norm="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    mlp_norm="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
)


class VisionNames(NamedTuple):
    """Names of the tensors of a tower over images of one size; `layers` is a prefix."""

    first: str = "embeddings.class_embedding"
    patches: str = "embeddings.patch_embedding"
    positions: str = "embeddings.position_embedding.weight"
    layers: str = "encoder.layers"
    final_norm: str = "post_layernorm"


class ClipVision:
    """A tower over images of one size. CLIP and others have a first token, which is of no patch; SigLIP has none. Gives [images, tokens of an image,
    hidden_size].

    final_norm: the tower's last norm is computed, too. stacked: a checkpoint has tables as stacks of one.
    """

    def __init__(
        self,
        media: MediaConfig,
        placement: Placement,
        prefix: str = "vision_tower.",
        *,
        final_norm: bool,
        names: VisionNames = VisionNames(),
        blocks: BlockOptions = _CLIP_BLOCKS,
        stacked: bool = False,
    ) -> None:
        config = self._config = media.vision
        size, is_clip, has_first = config.hidden_size, config.tower == "clip", config.tower != "siglip"
        self._prefix, self._names = prefix, names
        self._placement = placement
        self.side = config.image_size // config.patch_size
        kernel = (config.num_channels, config.patch_size, config.patch_size)
        self._patches = patch_layer(kernel, size, placement, bias=not is_clip)
        self._positions = Table((1,) * stacked + (self.side**2 + has_first, size), placement)
        self._first = Table((1, 1) * stacked + (size,), placement) if has_first else None
        self._norm = LayerNorm(size, config.norm_eps, placement) if is_clip else None
        self.tower = Tower(config, blocks, f"{prefix}{names.layers}", placement)
        self._final_norm = LayerNorm(size, config.norm_eps, placement) if final_norm else None
        self._drops_first = media.drops_first

    def run(self, items: Sequence[MediaInput]) -> Slices:
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
        prefix, names = self._prefix, self._names
        if self._first is not None:
            yield from self._first.weights(prefix + names.first)
        yield from self._patches.weights(f"{prefix}{names.patches}.weight", f"{prefix}{names.patches}.bias")
        yield from self._positions.weights(prefix + names.positions)
        if self._norm is not None:
            yield from self._norm.weights(f"{prefix}pre_layrnorm")
        yield from self.tower.weights()
        if self._final_norm is not None:
            yield from self._final_norm.weights(prefix + names.final_norm)


class TowerEncoder:
    """What `MediaEncoder`s over a tower have alike."""

    sees_ahead = False
    num_deep = 0
    tower: Tower

    @property
    def num_slices(self) -> int:
        return self.tower.num_slices

    def fuse(self, native: bool = True) -> str:
        return self.tower.fuse(native)


class ProjectedEncoder(TowerEncoder):
    """A `MediaEncoder` whose rows are made of what a vision tower gives for each tile, and projected to the size of the text model.

    rows_of: [tiles, patches, size of the tower] -> [rows of all tiles, size that is projected]. project: [rows, size] -> [rows, hidden_size of the
    text model], by `layers`. sees_ahead: see `MediaEncoder`.
    """

    def __init__(
        self,
        vision: ClipVision,
        rows_of: Callable[[torch.Tensor], torch.Tensor],
        project: Callable[[torch.Tensor], torch.Tensor],
        layers: Sequence[NamedLayer],
        sees_ahead: bool = False,
    ) -> None:
        self._vision, self.tower = vision, vision.tower
        self._rows_of, self._project, self._layers = rows_of, project, layers
        self.sees_ahead = sees_ahead

    def slices(self, items: Sequence[MediaInput]) -> Slices:
        """An item's values: [tiles, channels, height, width]; its rows are those of the tiles, one after the other."""
        parts = yield from self._vision.run(items)
        rows = [self._rows_of(part) for part in parts]
        return list(self._project(torch.cat(rows)).split([len(part) for part in rows]))

    def weights(self) -> Iterator[Weight]:
        yield from self._vision.weights()
        for layer, prefix in self._layers:
            yield from layer.weights(prefix)
