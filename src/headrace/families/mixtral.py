"""Mixtral: Mistral with a mixture of experts in every layer."""

from headrace.checkpoint.family import Decoder, DecoderOptions, Family

FAMILY = Family(
    decoders={
        "mixtral": Decoder(
            name="mixtral",
            options=DecoderOptions(
                qkv_bias=False,
                out_bias=False,
                experts="all",
                mlp_name="block_sparse_moe",
                expert_names=(("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")),
            ),
            defaults={
                "intermediate_size": 14336,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        )
    }
)
