"""All layers of an encoder as one native call: tokens of a text that all see each other, packed without padding, without a KV cache.

The call runs the same kernels in the same order as the layers would one by one, so both give the same bits. Made by the thread that loads the
model, called by the one that runs it.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from headrace.kernels import cpu, registry
from headrace.kernels.packing import PackedLinear, as_native, check_contiguous

Norm = tuple[torch.Tensor, torch.Tensor | None]
"""Weight float32[hidden_size] and bias float32[hidden_size] of a layer normalisation."""

_NO_NORM = (None, None)

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]


@dataclass(frozen=True, slots=True)
class EncoderLayerSpec:
    """One layer. qkv stacks the projections of q, k and v. up: of a gated layer [2 * intermediate_size, hidden_size], the half that is activated
    first, then the factor. attention_norm: None = none, of a layer of a pre-norm encoder. window: see `ops.packed_attention`.
    rope: cos, sin float32[max_positions, rotary_dim / 2], by which q and k are rotated; see `ops.rotary`.
    """

    qkv: PackedLinear
    out: PackedLinear
    up: PackedLinear
    down: PackedLinear
    attention_norm: Norm | None
    mlp_norm: Norm
    window: int = 0
    rope: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def linears(self) -> tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]:
        return self.qkv, self.out, self.up, self.down


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder between its embeddings and what is made of its hidden states.

    pre_norm: False (BERT): x = attention_norm(x + out(attention(x))), x = mlp_norm(x + down(act(up(x)))).
    True (ModernBERT): x += out(attention(attention_norm(x))), x += down(act(up(mlp_norm(x)))), and final_norm, if any, at the end.
    scale: factor on q.k. activation: with `gated`, of the first half of what `up` gives, which is multiplied by the second.
    """

    layers: tuple[EncoderLayerSpec, ...]
    pre_norm: bool
    final_norm: Norm | None
    eps: float
    num_heads: int
    head_dim: int
    scale: float
    activation: Activation
    gated: bool

    @property
    def hidden_size(self) -> int:
        return self.layers[0].mlp_norm[0].numel()


_ACTIVATIONS: dict[tuple[Activation, bool], int] = {
    ("gelu", False): 0,
    ("gelu", True): 0,
    ("gelu_tanh", False): 1,
    ("gelu_tanh", True): 1,
    ("silu", True): 2,
    ("relu", False): 3,
}
"""EncoderActivation of csrc/cpu/encoder.h, by name and whether it is gated: those that have a kernel."""

PHASES = ("norm", "qkv", "rotary", "attention", "out", "up", "activation", "down", "wait")
"""EncoderPhase of csrc/cpu/encoder.h, in its order. Linears quantise their input, too. wait: for the other threads."""


def rounds_attention(qkv: PackedLinear) -> bool:
    """Whether attention takes its products in bfloat16, `rounded` of `ops.packed_attention`: where the layer's linears round their input to
    bfloat16, or to 8 bits on a processor that is faster with it."""
    if qkv.layout in ("native_bf16_pairs", "torch_bf16"):
        return True
    return qkv.layout.startswith(("native_int8", "native_int4", "native_gguf")) and cpu.multiplies_bf16()


def why_not(spec: EncoderSpec) -> str:
    """Why `FusedEncoder` cannot run this encoder here, or ""."""
    if not registry.runs_native():
        return cpu.why_not() or "another implementation than the native kernels is preferred"
    if (spec.activation, spec.gated) not in _ACTIVATIONS:
        return f"there is no kernel for {spec.activation}{' with a gate' if spec.gated else ''}"
    for index, layer in enumerate(spec.layers):
        for linear in layer.linears:
            if not linear.layout.startswith("native"):
                return f"layer {index} has weights of layout {linear.layout}"
        if rounds_attention(layer.qkv) != rounds_attention(spec.layers[0].qkv):
            return f"layers 0 and {index} have weights of different kinds"
    return ""


class FusedEncoder:
    """An encoder's layers. Keeps every tensor it reads alive.

    It keeps the addresses of the weights: make a new one after weights have been loaded again.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        """ValueError when anything does not fit, or `why_not` says why."""
        reason = why_not(spec) if spec.layers else "it has no layers"
        native = cpu.load()
        if reason or native is None:
            raise ValueError(f"the fused encoder cannot run: {reason}")
        _check(spec)
        self._spec = spec
        self._hidden_size = spec.hidden_size
        self._encoder = native.Encoder(
            spec.hidden_size,
            spec.num_heads,
            spec.head_dim,
            spec.scale,
            spec.eps,
            spec.pre_norm,
            _ACTIVATIONS[spec.activation, spec.gated],
            spec.gated,
            rounds_attention(spec.layers[0].qkv),
            *as_native(*(spec.final_norm or _NO_NORM)),
        )
        for layer in spec.layers:
            rotation: tuple[torch.Tensor | int | None, ...] = (None, None, 0, 0)
            if layer.rope is not None:
                cos, sin = layer.rope
                rotation = cos, sin, 2 * cos.shape[1], cos.shape[0]
            self._encoder.add_layer(
                *as_native(*(layer.attention_norm or _NO_NORM), layer.qkv.native, layer.out.native),
                *as_native(*layer.mlp_norm, layer.up.native, layer.down.native, layer.window, *rotation),
            )

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor, row_starts: torch.Tensor) -> torch.Tensor:
        """Run all layers and the final norm, if there is one.

        hidden: float32[tokens, hidden_size], after the embeddings and their norm. positions: int32[tokens]. row_starts: int32[num_seqs + 1], see
        `ops.packed_attention`. Returns `hidden`, overwritten with the result. ValueError when a size, position or start does not fit;
        then nothing is written.
        """
        tokens = hidden.shape[0]
        check_contiguous("encoder: hidden", hidden, torch.float32, (tokens, self._hidden_size))
        check_contiguous("encoder: positions", positions, torch.int32, (tokens,))
        num_seqs = row_starts.numel() - 1
        check_contiguous("encoder: row_starts", row_starts, torch.int32, (max(1, num_seqs + 1),))
        self._encoder.forward(hidden.data_ptr(), tokens, positions.data_ptr(), row_starts.data_ptr(), num_seqs)
        return hidden

    def phase_seconds(self) -> dict[str, float]:
        """Seconds that the calling thread spent in each of PHASES since the last call of this."""
        return dict(zip(PHASES, self._encoder.phase_seconds(), strict=True))


def _check(spec: EncoderSpec) -> None:
    """ValueError unless every tensor has the size and precision that the native call takes for granted."""
    hidden, width = spec.hidden_size, spec.num_heads * spec.head_dim
    for index, layer in enumerate(spec.layers):
        inner = layer.down.k
        sizes = ((3 * width, hidden), (hidden, width), ((1 + spec.gated) * inner, hidden), (hidden, inner))
        for name, linear, size in zip(("qkv", "out", "up", "down"), layer.linears, sizes, strict=True):
            if (linear.n, linear.k) != size:
                raise ValueError(f"encoder: {name} of layer {index} is [{linear.n}, {linear.k}], not {list(size)}")
        if layer.attention_norm is None and not spec.pre_norm:
            raise ValueError(f"encoder: layer {index} has no norm after its attention")
        for norm in (layer.attention_norm, layer.mlp_norm):
            _check_norm(norm, hidden)
        if layer.window < 0:
            raise ValueError(f"encoder: the window of layer {index} is {layer.window}")
        if layer.rope is not None:
            cos, sin = layer.rope
            if cos.dim() != 2 or 2 * cos.shape[1] > spec.head_dim:
                raise ValueError(f"encoder: cos {tuple(cos.shape)} does not fit head_dim {spec.head_dim}")
            check_contiguous("encoder: cos", cos, torch.float32, tuple(cos.shape))
            check_contiguous("encoder: sin", sin, torch.float32, tuple(cos.shape))
    _check_norm(spec.final_norm, hidden)


def _check_norm(norm: Norm | None, size: int) -> None:
    for tensor in norm or ():
        if tensor is not None:
            check_contiguous("encoder: norm", tensor, torch.float32, (size,))
