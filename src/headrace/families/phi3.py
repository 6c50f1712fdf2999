"""Phi-3, which runs transformers' code."""

from headrace.checkpoint.family import Decoder, Family

FAMILY = Family(
    decoders={
        "phi3": Decoder(
            defaults={
                "vocab_size": 32064,
                "hidden_size": 3072,
                "intermediate_size": 8192,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "bos_token_id": 1,
                "eos_token_id": 32000,
                "pad_token_id": 32000,
            }
        )
    }
)
