"""Qwen3: Llama with RMSNorm on each head of q and k; in Qwen3-MoE, the feed-forward layer is sparse where the config says so."""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.family import Decoder, DecoderOptions, Family, Gguf
from headrace.families.qwen2 import DENSE, SPARSE

if TYPE_CHECKING:
    from headrace.checkpoint.gguf import GgufFile

OPTIONS = DecoderOptions(qk_norm=True)


def _gguf_experts(file: "GgufFile", config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": file.count("qwen3moe.expert_count"),
        "num_experts_per_tok": file.count("qwen3moe.expert_used_count"),
        "moe_intermediate_size": file.count("qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


FAMILY = Family(
    decoders={
        "qwen3": Decoder(
            name="qwen3",
            options=OPTIONS,
            sliding="upper",
            defaults=DENSE | {"num_key_value_heads": 32, "head_dim": 128},
        ),
        "qwen3_moe": Decoder(
            name="qwen3_moe",
            options=DecoderOptions(qk_norm=True, experts="some"),
            sliding="upper",
            defaults=SPARSE
            | {
                "intermediate_size": 6144,
                "num_key_value_heads": 4,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            },
        ),
    },
    gguf={
        "qwen3": Gguf(model_type="qwen3", architecture="Qwen3ForCausalLM"),
        "qwen3moe": Gguf(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", config=_gguf_experts),
    },
)
