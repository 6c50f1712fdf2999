"""Qwen2 and Qwen2.5: Llama with biases on q, k and v. Their mixture of experts runs transformers' code."""

from typing import Any

from headrace.checkpoint.family import Decoder, DecoderOptions, Family, Gguf

OPTIONS = DecoderOptions(qkv_bias=True, out_bias=False)
"""The biases are part of the architecture; config.json does not mention them."""

DENSE: dict[str, Any] = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
SPARSE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "decoder_sparse_step": 1,
}

FAMILY = Family(
    decoders={
        "qwen2": Decoder(
            name="qwen2",
            options=OPTIONS,
            sliding="upper",
            defaults=DENSE | {"num_key_value_heads": 32, "attention_bias": True},
        ),
        "qwen2_moe": Decoder(
            sliding="upper",
            defaults=SPARSE
            | {
                "intermediate_size": 5632,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "attention_bias": True,
            },
        ),
    },
    gguf={"qwen2": Gguf(model_type="qwen2", architecture="Qwen2ForCausalLM")},
)
