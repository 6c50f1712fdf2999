"""Qwen2 and Qwen2.5, also in Qwen2-VL and Qwen2.5-VL: Llama with biases on q, k and v."""

from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.weight import Placement
from headrace.models.decoder import BlockOptions, DecoderLM
from headrace.models.spec import CausalLM, ModelSpec


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """The biases are part of the architecture; config.json does not mention them."""
    return DecoderLM(config, BlockOptions(qkv_bias=True), placement)


SPEC = ModelSpec("qwen2", ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"), build)
