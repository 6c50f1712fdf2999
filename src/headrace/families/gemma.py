"""Gemma 1 and 2, which run transformers' code."""

from typing import Any

from headrace.checkpoint.family import Decoder, Family

_ALL: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
SECOND: dict[str, Any] = _ALL | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}

FAMILY = Family(
    decoders={
        "gemma": Decoder(
            defaults=_ALL
            | {
                "vocab_size": 256000,
                "hidden_size": 3072,
                "intermediate_size": 24576,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
            }
        ),
        "gemma2": Decoder(
            sliding="even", defaults=SECOND | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        ),
    }
)
