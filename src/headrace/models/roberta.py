"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions are counted from after the padding id, with another head (Y. Liu et al., 2019)."""

from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.pooling import PoolingConfig
from headrace.layers.pooler import HeadLinear, Pooler
from headrace.layers.weight import Placement
from headrace.models.bert import BLOCKS, EMBEDDINGS, UNUSED
from headrace.models.encoder import Encoder, without_prefix
from headrace.models.spec import EncoderModel, EncoderSpec

MODEL_TYPES = ("roberta", "xlm-roberta", "camembert")


def spec(pooling: PoolingConfig) -> EncoderSpec:
    """Classifiers read the first token, by a head of two layers."""

    def build(config: ModelConfig, placement: Placement) -> EncoderModel:
        size = config.hidden_size
        if pooling.task == "embed":
            return Encoder(config, EMBEDDINGS, BLOCKS, Pooler(pooling, size, placement), placement)
        head = (
            HeadLinear("", "classifier.dense", size, size, placement, activation="tanh"),
            HeadLinear("", "classifier.out_proj", size, len(pooling.labels), placement),
        )
        return Encoder(config, EMBEDDINGS, BLOCKS, Pooler(pooling, size, placement, head), placement)

    return EncoderSpec("roberta", MODEL_TYPES, build, ignored=UNUSED, renaming=without_prefix("roberta."))
