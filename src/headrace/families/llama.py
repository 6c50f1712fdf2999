"""Llama and models with the same structure: Llama 1-3, SmolLM, Mistral (which may have a sliding window), Mixtral (experts in every layer)."""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.family import Decoder, DecoderOptions, Family, Gguf
from headrace.errors import ModelError

if TYPE_CHECKING:
    from headrace.checkpoint.gguf import GgufFile


def _gguf_config(file: "GgufFile", config: dict[str, Any]) -> dict[str, Any]:
    if file.get("llama.expert_count"):
        raise ModelError(f"{file.path.name}: mixtures of experts of architecture llama are not supported")
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


FAMILY = Family(
    decoders={
        "llama": Decoder(name="llama", options=DecoderOptions(), defaults={"bos_token_id": 1, "eos_token_id": 2}),
        "mistral": Decoder(
            name="llama",
            options=DecoderOptions(),
            defaults={
                "intermediate_size": 14336,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
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
        ),
    },
    # Mistral models convert to it, too.
    gguf={"llama": Gguf(model_type="llama", architecture="LlamaForCausalLM", config=_gguf_config, interleaved=True)},
)
