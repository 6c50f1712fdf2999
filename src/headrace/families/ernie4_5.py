"""Ernie 4.5, dense: Llama whose rotation pairs neighbours.

Source: Baidu, "ERNIE 4.5 Technical Report" (2025).
"""

from headrace.checkpoint.family import Decoder, DecoderOptions, Family, Gguf

FAMILY = Family(
    decoders={
        "ernie4_5": Decoder(
            name="ernie4_5",
            options=DecoderOptions(interleaved=True),
            refused={"use_bias": "biases of all projections (use_bias) are not supported"},
            defaults={
                "vocab_size": 103424,
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 18,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "tie_word_embeddings": True,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        )
    },
    gguf={"ernie4_5": Gguf(model_type="ernie4_5", architecture="Ernie4_5ForCausalLM")},
)
