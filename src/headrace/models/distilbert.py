"""DistilBERT: half of BERT's layers, without token types (V. Sanh et al., 2019)."""

from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.pooling import PoolingConfig
from headrace.layers.pooler import HeadLinear, Pooler
from headrace.layers.weight import Placement
from headrace.models.encoder import BlockOptions, EmbeddingOptions, Encoder, without_prefix
from headrace.models.spec import EncoderModel, EncoderSpec

MODEL_TYPES = ("distilbert",)

_EMBEDDINGS = EmbeddingOptions(
    words="embeddings.word_embeddings", norm="embeddings.LayerNorm", positions="embeddings.position_embeddings"
)
_BLOCKS = BlockOptions(
    layers="transformer.layer",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)
_UNUSED = ("position_ids", "vocab_", "classifier.")


def spec(pooling: PoolingConfig) -> EncoderSpec:
    """Classifiers read the first token, by a head of two layers."""

    def build(config: ModelConfig, placement: Placement) -> EncoderModel:
        size = config.hidden_size
        if pooling.task == "embed":
            return Encoder(config, _EMBEDDINGS, _BLOCKS, Pooler(pooling, size, placement), placement)
        head = (
            HeadLinear("", "pre_classifier", size, size, placement, activation="relu"),
            HeadLinear("", "classifier", size, len(pooling.labels), placement),
        )
        return Encoder(config, _EMBEDDINGS, _BLOCKS, Pooler(pooling, size, placement, head), placement)

    return EncoderSpec("distilbert", MODEL_TYPES, build, ignored=_UNUSED, renaming=without_prefix("distilbert."))
