"""Llama and models with the same structure: Llama 1-3, SmolLM, Mistral (which may have a sliding window)."""

from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.weight import Placement
from headrace.models.decoder import BlockOptions, DecoderLM
from headrace.models.spec import CausalLM, ModelSpec


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """Pre-norm blocks; `attention_bias` adds biases to all four projections."""
    options = BlockOptions(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    return DecoderLM(config, options, placement)


SPEC = ModelSpec("llama", ("llama", "mistral"), build)
