"""Cohere2 (Command R7B, Aya Expanse 2 and others): parallel blocks, and layers of a sliding window that rotate beside others without positions.

Source: Cohere, "Command A: An Enterprise-Ready Large Language Model" (2025).
"""

from headrace.checkpoint.family import Decoder, DecoderOptions, Family

FAMILY = Family(
    decoders={
        "cohere2": Decoder(
            name="cohere2",
            options=DecoderOptions(layer_norms=True, parallel=True, interleaved=True, rotates="sliding"),
            sliding="pattern",
            common_names={"layer_norm_eps": "rms_norm_eps"},
            defaults={
                "vocab_size": 256000,
                "hidden_size": 8192,
                "intermediate_size": 22528,
                "logit_scale": 0.0625,
                "num_hidden_layers": 40,
                "num_attention_heads": 64,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "pad_token_id": 0,
                "bos_token_id": 5,
                "eos_token_id": 255001,
            },
        )
    }
)
