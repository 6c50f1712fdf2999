"""The encoder of the BERT family: blocks of attention in both directions and a feed-forward layer, over texts packed without padding.

Differences between families, among them the names of the tensors, are in the `Encoder` of `checkpoint/family.py` that each fills in. Runs in the
thread that runs the model. Sources: J. Devlin et al., "BERT" (2018), with norms after each part; B. Warner et al., "Smarter, Better, Faster, Longer"
(ModernBERT, 2024), with norms before each part, rotary positions, sliding windows and a gated feed-forward layer.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from headrace import kernels
from headrace.attention.base import StepAttention
from headrace.checkpoint import family
from headrace.checkpoint.family import EmbeddingOptions, EncoderOptions
from headrace.checkpoint.layer_config import EncoderConfig, RopeConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.pooling import PoolingConfig
from headrace.errors import ModelError
from headrace.kernels import EncoderLayerSpec, EncoderSpec, FusedEncoder
from headrace.kernels.encoder import Activation, why_not
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear
from headrace.layers.mlp import ACTIVATIONS, FUNCTIONS, ExpertCounts
from headrace.layers.norm import LayerNorm
from headrace.layers.pooler import Activation as HeadActivation
from headrace.layers.pooler import HeadLinear, Pooler
from headrace.layers.rotary import Rotary
from headrace.layers.weight import NamedLayer, Placement, Weight


class Block:
    def __init__(
        self, config: ModelConfig, layer: int, options: EncoderOptions, rotary: Rotary | None, placement: Placement
    ) -> None:
        encoder = encoder_of(config)
        size = config.hidden_size
        outputs = dict.fromkeys(options.qkv, 3 * size // len(options.qkv))
        width = config.intermediate_size * (2 if options.gated else 1)
        self._qkv = Linear(size, outputs, placement, bias=encoder.attention_bias)
        self._out = Linear(size, {options.out: size}, placement, bias=encoder.attention_bias)
        self._up = Linear(size, {options.up: width}, placement, bias=encoder.mlp_bias)
        self._down = Linear(config.intermediate_size, {options.down: size}, placement, bias=encoder.mlp_bias)
        without = options.pre_norm and layer == 0
        self._attention_norm = None if without else norm(config, placement)
        self._mlp_norm = norm(config, placement)
        self._activate = FUNCTIONS[activation(config, options), options.gated]
        self._rotary = rotary
        self._options = options
        self._num_heads, self._head_dim, self._scale = config.num_q_heads, config.head_dim, config.attention_scale
        self._window = encoder.window if config.layer_types[layer] == "sliding_attention" else 0

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, row_starts: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """x [tokens, hidden_size], which it may overwrite -> the same shape."""
        if self._options.pre_norm:
            normed = x if self._attention_norm is None else self._attention_norm(x)
            x = x + self._attend(normed, positions, row_starts, attention)
            return x + self._feed_forward(self._mlp_norm(x))
        assert self._attention_norm is not None
        x = self._attention_norm(self._attend(x, positions, row_starts, attention), x)
        return self._mlp_norm(self._feed_forward(x), x)

    def _attend(
        self, x: torch.Tensor, positions: torch.Tensor, row_starts: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        heads = self._qkv(x).unflatten(1, (3 * self._num_heads, self._head_dim))
        q, k, v = heads.split(self._num_heads, dim=1)
        if self._rotary is not None:
            self._rotary(q, k, positions)
        rounded = kernels.rounds_attention(self._qkv.packed)
        attended = attention.attend_encoder(q, k, v, row_starts, self._scale, window=self._window, rounded=rounded)
        return self._out(attended.flatten(1))

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._activate(self._up(x)))

    def fused(self) -> EncoderLayerSpec:
        return EncoderLayerSpec(
            qkv=self._qkv.packed,
            out=self._out.packed,
            up=self._up.packed,
            down=self._down.packed,
            attention_norm=None if self._attention_norm is None else self._attention_norm.parameters,
            mlp_norm=self._mlp_norm.parameters,
            window=self._window,
            rope=None if self._rotary is None else (self._rotary.cos, self._rotary.sin),
        )

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self._qkv.weights(prefix)
        yield from self._out.weights(prefix)
        if self._attention_norm is not None:
            yield from self._attention_norm.weights(f"{prefix}{self._options.attention_norm}")
        yield from self._up.weights(prefix)
        yield from self._down.weights(prefix)
        yield from self._mlp_norm.weights(f"{prefix}{self._options.mlp_norm}")


class Embeddings:
    def __init__(self, config: ModelConfig, options: EmbeddingOptions, placement: Placement) -> None:
        encoder = encoder_of(config)
        self._options = options
        self._first_position = encoder.first_position
        self._words = Embedding(config.vocab_size, config.hidden_size, placement)
        self._positions = Embedding(encoder.num_positions, config.hidden_size, placement) if options.positions else None
        self._num_types = encoder.num_token_types
        has_types = bool(options.types) and encoder.num_token_types > 0
        self._types = Embedding(encoder.num_token_types, config.hidden_size, placement) if has_types else None
        self._norm = norm(config, placement)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor | None
    ) -> torch.Tensor:
        """See `EncoderModel.forward` -> [num_tokens, hidden_size], a fresh tensor."""
        x = self._words(token_ids)
        if self._types is not None:
            # With a single type, as RoBERTa has, a tokenizer may number the texts of a pair all the same.
            x += self._types(token_ids.new_zeros(1) if token_types is None or self._num_types == 1 else token_types)
        if self._positions is not None:
            x += self._positions(positions + self._first_position)
        return self._norm(x)

    def weights(self) -> Iterator[Weight]:
        yield from self._words.weights(self._options.words)
        if self._positions is not None:
            yield from self._positions.weights(self._options.positions)
        if self._types is not None:
            yield from self._types.weights(self._options.types)
        yield from self._norm.weights(self._options.norm)


class Encoder:
    """Embeddings, blocks, pooler: an `EncoderModel`."""

    def __init__(
        self,
        config: ModelConfig,
        own: family.Encoder,
        pooling: PoolingConfig,
        placement: Placement,
    ) -> None:
        encoder, options = encoder_of(config), own.blocks
        head = _head(config, own, pooling, placement) if pooling.task == "classify" else ()
        self.pooler = Pooler(pooling, config.hidden_size, placement, head)
        self._config = config
        self._fused: FusedEncoder | None = None
        self._options = options
        self._embeddings = Embeddings(config, own.embeddings, placement)
        ropes: dict[str, Rotary] = {}

        def rotary(rope: RopeConfig) -> Rotary:
            # Layers with the same parameters share their tables.
            if (key := repr(rope)) not in ropes:
                ropes[key] = Rotary(rope, config.head_dim, config.max_position_embeddings, placement)
            return ropes[key]

        self._blocks = [
            Block(config, layer, options, rotary(config.rope_for(layer)) if encoder.rope else None, placement)
            for layer in range(config.num_layers)
        ]
        self._final_norm = norm(config, placement) if options.final_norm else None

    def weights(self) -> Iterator[Weight]:
        yield from self._embeddings.weights()
        for index, block in enumerate(self._blocks):
            yield from block.weights(f"{self._options.layers}.{index}.")
        if self._final_norm is not None:
            yield from self._final_norm.weights(self._options.final_norm)
        yield from self.pooler.weights()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        row_starts: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        x = self._embeddings(token_ids, positions, token_types)
        if self._fused is not None:
            return self._fused(x, positions, row_starts)
        for block in self._blocks:
            x = block(x, positions, row_starts, attention)
        return x if self._final_norm is None else self._final_norm(x)

    def expert_counts(self) -> Mapping[int, ExpertCounts]:
        return {}

    def fuse(self, attention: StepAttention) -> str:
        """See `Model.fuse`. There is no pool: only the kind of the backend counts."""
        self._fused = None
        if not attention.name.startswith("cpu"):
            return f"attention backend {attention.name} is not that of the native kernels"
        config, options = self._config, self._options
        spec = EncoderSpec(
            layers=tuple(block.fused() for block in self._blocks),
            pre_norm=options.pre_norm,
            final_norm=None if self._final_norm is None else self._final_norm.parameters,
            eps=encoder_of(config).norm_eps,
            num_heads=config.num_q_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            activation=activation(config, options),
            gated=options.gated,
        )
        reason = why_not(spec)
        if not reason:
            self._fused = FusedEncoder(spec)
        return reason

    def phase_seconds(self) -> dict[str, float]:
        return {} if self._fused is None else self._fused.phase_seconds()


_HEAD_ACTIVATIONS: dict[str, HeadActivation] = {"gelu": "gelu", "relu": "relu", "silu": "silu", "tanh": "tanh"}


def _head(
    config: ModelConfig, own: family.Encoder, pooling: PoolingConfig, placement: Placement
) -> tuple[NamedLayer, ...]:
    """What makes scores of a pooled hidden state. Raises ModelError for an activation that is not known."""
    size, (hidden, out) = config.hidden_size, own.head
    act = own.head_activation or encoder_of(config).classifier_act
    if act not in _HEAD_ACTIVATIONS:
        known = ", ".join(_HEAD_ACTIVATIONS)
        raise ModelError(f"classifier_activation {act!r:.80} is not supported; known: {known}")
    bias = encoder_of(config).classifier_bias
    first = HeadLinear(hidden, size, size, placement, bias=bias, activation=_HEAD_ACTIVATIONS[act]), ""
    last = HeadLinear(out, size, len(pooling.labels), placement), ""
    return (first, (norm(config, placement), own.head_norm), last) if own.head_norm else (first, last)


def encoder_of(config: ModelConfig) -> EncoderConfig:
    assert config.encoder is not None, config.model_type
    return config.encoder


def norm(config: ModelConfig, placement: Placement) -> LayerNorm:
    encoder = encoder_of(config)
    return LayerNorm(config.hidden_size, encoder.norm_eps, placement, bias=encoder.norm_bias)


def activation(config: ModelConfig, options: EncoderOptions) -> Activation:
    """Our name of the feed-forward layers' activation. Raises ModelError for one that is not known."""
    ours = ACTIVATIONS.get(config.hidden_act)
    if ours is None or (ours, options.gated) not in FUNCTIONS:
        known = [name for name, act in ACTIVATIONS.items() if (act, options.gated) in FUNCTIONS]
        raise ModelError(f"activation {config.hidden_act!r:.80} is not supported; known: {', '.join(known)}")
    return ours


def without_prefix(prefix: str) -> Callable[[ModelConfig], Callable[[str], str]]:
    """Renaming for families whose checkpoints have names with and without the prefix of the base model. Old checkpoints call a norm's weight gamma,
    and its bias beta."""

    def rename(name: str) -> str:
        name = name.removeprefix(prefix)
        for old, new in (("gamma", "weight"), ("beta", "bias")):
            if name.endswith(f"LayerNorm.{old}"):
                return name.removesuffix(old) + new
        return name

    return lambda config: rename
