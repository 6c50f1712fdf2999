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
    return spec_like_bert("bert", MODEL_TYPES, pooling, ("pooler.dense", "classifier"))


def spec_like_bert(
    name: str, model_types: tuple[str, ...], pooling: PoolingConfig, head: tuple[str, str]
) -> EncoderSpec:
    """A family with BERT's layers and names. name: also the prefix of its tensors. head: names of a classifier's two layers."""

    def build(config: ModelConfig, placement: Placement) -> EncoderModel:
        size, (hidden, out) = config.hidden_size, head
        layers: tuple[HeadLinear, ...] = ()
        if pooling.task == "classify":
            layers = (
                HeadLinear("", hidden, size, size, placement, activation="tanh"),
                HeadLinear("", out, size, len(pooling.labels), placement),
            )
        return Encoder(config, EMBEDDINGS, BLOCKS, Pooler(pooling, size, placement, layers), placement)

    return EncoderSpec(name, model_types, build, ignored=UNUSED, renaming=without_prefix(f"{name}."))
