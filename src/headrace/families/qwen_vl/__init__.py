"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: the text models of Qwen2 and Qwen3 with positions in three parts."""

from typing import Any

from headrace.checkpoint.family import Decoder, Family
from headrace.families import qwen2, qwen3

_QWEN2: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "attention_bias": True,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}

_QWEN2_TEXT = Decoder(name="qwen2", options=qwen2.OPTIONS, sliding="upper", defaults=_QWEN2, is_inner=True)

FAMILY = Family(
    decoders={
        "qwen2_vl_text": _QWEN2_TEXT,
        "qwen2_5_vl_text": _QWEN2_TEXT,
        "qwen3_vl_text": Decoder(name="qwen3", options=qwen3.OPTIONS, sliding="upper", defaults=_QWEN3, is_inner=True),
    }
)
