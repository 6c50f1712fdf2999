"""BERT: learned positions, token types, norms after each part (J. Devlin et al., 2018)."""

from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.pooling import PoolingConfig
from headrace.layers.pooler import HeadLinear, Pooler
from headrace.layers.weight import Placement
from headrace.models.encoder import BlockOptions, EmbeddingOptions, Encoder, without_prefix
from headrace.models.spec import EncoderModel, EncoderSpec

MODEL_TYPES = ("bert",)

EMBEDDINGS = EmbeddingOptions(
    words="embeddings.word_embeddings",
    norm="embeddings.LayerNorm",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
)
BLOCKS = BlockOptions(
    layers="encoder.layer",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
UNUSED = ("position_ids", "pooler.", "cls.", "lm_head.", "classifier.")
"""Parts of names of tensors that a model without these heads has no use for."""


def spec(pooling: PoolingConfig) -> EncoderSpec:
    """Classifiers read the first token through BERT's pooler, a layer with tanh; embeddings do without."""

    def build(config: ModelConfig, placement: Placement) -> EncoderModel:
        size = config.hidden_size
        if pooling.task == "embed":
            return Encoder(config, EMBEDDINGS, BLOCKS, Pooler(pooling, size, placement), placement)
        head = (
            HeadLinear("", "pooler.dense", size, size, placement, activation="tanh"),
            HeadLinear("", "classifier", size, len(pooling.labels), placement),
        )
        return Encoder(config, EMBEDDINGS, BLOCKS, Pooler(pooling, size, placement, head), placement)

    return EncoderSpec("bert", MODEL_TYPES, build, ignored=UNUSED, renaming=without_prefix("bert."))
