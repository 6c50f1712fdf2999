"""The layers of encoders of images and sounds: attention in both directions within an item, and a feed-forward layer, each after a norm and with a
residual.

Owns the blocks. Differences between towers, among them the names of the tensors, are in `BlockOptions`. Runs in the thread that runs the model.

Source: A. Dosovitskiy et al., "An Image is Worth 16x16 Words" (ViT, 2020).
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import torch

from headrace import kernels
from headrace.checkpoint.media_keys import TowerConfig
from headrace.errors import ModelError
from headrace.kernels import EncoderLayerSpec, EncoderSpec, FusedEncoder
from headrace.kernels.encoder import Activation, why_not
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm, RMSNorm
from headrace.layers.weight import Placement, Weight
from headrace.models.towers.table import Table

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

_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": kernels.gelu,
    "gelu_pytorch_tanh": kernels.gelu_tanh,
    "gelu_new": kernels.gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": torch.relu,
}
_GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": kernels.gelu_mul,
    "gelu_pytorch_tanh": kernels.gelu_tanh_mul,
    "silu": kernels.silu_mul,
}
"""By the Hugging Face name; those of gated layers take what is activated, and the factor on it."""
_FUSED: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
"""Those that the fused encoder has."""


def activation(name: str, gated: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """[rows, size] -> the same; gated: [rows, 2 * size] -> [rows, size]. Raises ModelError for one that is not known."""
    known = _GATED if gated else _PLAIN
    if name not in known:
        raise ModelError(f"activation {name!r:.80} of the encoder is not supported; known: {', '.join(known)}")
    return known[name]


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
    """One layer."""

    def __init__(self, config: TowerConfig, options: BlockOptions, placement: Placement) -> None:
        size, width = config.hidden_size, config.num_heads * config.head_dim
        outputs = dict.fromkeys(options.qkv, 3 * width // len(options.qkv))
        qkv_bias = options.bias if options.qkv_bias is None else options.qkv_bias
        self._qkv = Linear(size, outputs, placement, bias=qkv_bias, unbiased=options.unbiased)
        self._out = Linear(width, {options.out: size}, placement, bias=options.bias)
        self._up = Linear(size, dict.fromkeys(options.up, config.intermediate_size), placement, bias=options.bias)
        self._down = Linear(config.intermediate_size, {options.down: size}, placement, bias=options.bias)
        self._attention_norm, self._mlp_norm = (tower_norm(config, options.rms, placement) for _ in range(2))
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
        """q, k and v [tokens, heads, head_dim]."""
        heads = self._config.num_heads
        q, k, v = self._qkv(x).unflatten(1, (3 * heads, self._config.head_dim)).split(heads, dim=1)
        if items.rope is not None:
            kernels.rotary(q, k, items.positions, *items.rope)
        return q, k, v

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, items: PackedItems) -> torch.Tensor:
        """[tokens, heads, head_dim] of these heads."""
        rounded = kernels.rounds_attention(self._qkv.packed)
        return kernels.packed_attention(q, k, v, items.row_starts, self._config.head_dim**-0.5, rounded=rounded)

    def _fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._activate(self._up(self._mlp_norm(x))))

    def fuse(self, native: bool = True) -> str:
        """See `MediaEncoder.fuse`; for the layer by itself, since work stops between layers."""
        self._fused = None
        if not native:
            return "another implementation is preferred"
        config, options = self._config, self._options
        if not isinstance(self._attention_norm, LayerNorm) or not isinstance(self._mlp_norm, LayerNorm):
            return "its norms are RMSNorms"
        if self._scales:
            return "it has factors on what its parts give"
        if len(options.up) > 1 or config.hidden_act not in _FUSED:
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
            activation=_FUSED[config.hidden_act],
            gated=False,
        )
        if reason := why_not(spec):
            return reason
        self._fused = FusedEncoder(spec)
        return ""

    def weights(self, prefix: str) -> Iterator[Weight]:
        """The layer's tensors, under the tower's names."""
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


def tower_norm(config: TowerConfig, rms: bool, placement: Placement) -> LayerNorm | RMSNorm:
    """A norm over the tower's hidden states."""
    if rms:
        return RMSNorm(config.hidden_size, config.norm_eps, placement)
    return LayerNorm(config.hidden_size, config.norm_eps, placement)


def in_floats(placement: Placement) -> Placement:
    """The placement of layers that stay in floats where others are quantised: what they read varies too much, or is too short."""
    return replace(placement, quantization="none")
