"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions are counted from after the padding id, with another head (Y. Liu et al., 2019)."""

from headrace.checkpoint.pooling import PoolingConfig
from headrace.models.bert import spec_like_bert
from headrace.models.spec import EncoderSpec

MODEL_TYPES = ("roberta", "xlm-roberta", "camembert")


def spec(pooling: PoolingConfig) -> EncoderSpec:
    """Classifiers read the first token, by a head of two layers."""
    return spec_like_bert("roberta", MODEL_TYPES, pooling, ("classifier.dense", "classifier.out_proj"))
