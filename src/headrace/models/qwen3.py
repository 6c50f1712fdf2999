"""Qwen3 (dense), also in Qwen3-VL: Llama with RMSNorm on each head of q and k."""

from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.weight import Placement
from headrace.models.decoder import BlockOptions, DecoderLM
from headrace.models.spec import CausalLM, ModelSpec


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """`attention_bias` adds biases to all four projections, as in Llama."""
    options = BlockOptions(qkv_bias=config.attention_bias, out_bias=config.attention_bias, qk_norm=True)
    return DecoderLM(config, options, placement)


SPEC = ModelSpec("qwen3", ("qwen3", "qwen3_vl_text"), build)
