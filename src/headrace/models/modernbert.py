"""ModernBERT: rotary positions, norms before each part, sliding windows in most layers, a gated feed-forward layer (B. Warner et al., 2024)."""

from collections.abc import Iterator

import torch

from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.pooling import PoolingConfig
from headrace.errors import ModelError
from headrace.layers.norm import LayerNorm
from headrace.layers.pooler import Activation, HeadLinear, Pooler
from headrace.layers.weight import Placement, Weight
from headrace.models.encoder import BlockOptions, EmbeddingOptions, Encoder, encoder_of, norm, without_prefix
from headrace.models.spec import EncoderModel, EncoderSpec

MODEL_TYPES = ("modernbert",)

_EMBEDDINGS = EmbeddingOptions(words="embeddings.tok_embeddings", norm="embeddings.norm")
_BLOCKS = BlockOptions(
    layers="layers",
    qkv=("attn.Wqkv",),
    out="attn.Wo",
    attention_norm="attn_norm",
    up="mlp.Wi",
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    final_norm="final_norm",
    pre_norm=True,
    gated=True,
)
_UNUSED = ("head.", "decoder.", "classifier.")
_HEAD_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "relu": "relu", "silu": "silu", "tanh": "tanh"}


class _HeadNorm:
    """The norm of the head."""

    def __init__(self, layer: LayerNorm) -> None:
        self._norm = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden_size] -> the same shape."""
        return self._norm(x)

    def weights(self) -> Iterator[Weight]:
        """`head.norm.weight`, and `.bias` where there is one."""
        yield from self._norm.weights("head.norm")


def spec(pooling: PoolingConfig) -> EncoderSpec:
    """Classifiers read the first token or the mean of all, by a head of a layer, a norm and another layer."""

    def build(config: ModelConfig, placement: Placement) -> EncoderModel:
        size, encoder = config.hidden_size, encoder_of(config)
        if pooling.task == "embed":
            return Encoder(config, _EMBEDDINGS, _BLOCKS, Pooler(pooling, size, placement), placement)
        if encoder.classifier_act not in _HEAD_ACTIVATIONS:
            known = ", ".join(_HEAD_ACTIVATIONS)
            raise ModelError(f"classifier_activation {encoder.classifier_act!r:.80} is not supported; known: {known}")
        act = _HEAD_ACTIVATIONS[encoder.classifier_act]
        head = (
            HeadLinear("head.", "dense", size, size, placement, bias=encoder.classifier_bias, activation=act),
            _HeadNorm(norm(config, placement)),
            HeadLinear("", "classifier", size, len(pooling.labels), placement),
        )
        return Encoder(config, _EMBEDDINGS, _BLOCKS, Pooler(pooling, size, placement, head), placement)

    return EncoderSpec("modernbert", MODEL_TYPES, build, ignored=_UNUSED, renaming=without_prefix("model."))
