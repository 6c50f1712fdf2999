"""Qwen3 with a mixture of experts in some or all layers."""

from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.moe import SparseMoe
from headrace.layers.weight import Placement
from headrace.models.decoder import BlockOptions, DecoderLM, Mlp, gated_mlp
from headrace.models.spec import CausalLM, ModelSpec


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """Attention as in Qwen3; the feed-forward layer is sparse where the config says so."""
    options = BlockOptions(qkv_bias=config.attention_bias, out_bias=config.attention_bias, qk_norm=True, mlp=_mlp)
    return DecoderLM(config, options, placement)


def _mlp(config: ModelConfig, layer: int, placement: Placement) -> Mlp:
    if config.moe is None or not config.moe.is_sparse(layer):
        return gated_mlp(config, layer, placement)
    return SparseMoe(config.hidden_size, config.moe, config.hidden_act, placement)


SPEC = ModelSpec("qwen3_moe", ("qwen3_moe",), build)
