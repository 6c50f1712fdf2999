"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions are counted from after the padding id, with another head (Y. Liu et al., 2019)."""

from typing import Any

from headrace.checkpoint.family import Encoder, Family
from headrace.families.bert import BLOCKS, DEFAULTS, EMBEDDINGS, UNUSED

_DEFAULTS: dict[str, Any] = DEFAULTS | {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def _encoder(**defaults: Any) -> Encoder:
    return Encoder(
        name="roberta",
        prefix="roberta.",
        defaults=_DEFAULTS | defaults,
        embeddings=EMBEDDINGS,
        blocks=BLOCKS,
        head=("classifier.dense", "classifier.out_proj"),
        head_activation="tanh",
        unused=UNUSED,
        after_padding=True,
    )


FAMILY = Family(
    encoders={
        "roberta": _encoder(),
        "xlm-roberta": _encoder(vocab_size=30522),
        "camembert": _encoder(vocab_size=30522),
    }
)
