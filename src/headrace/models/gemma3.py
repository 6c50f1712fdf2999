"""Gemma 3 (text): local and global layers with their own rotation, norms on both sides of each part, scaled embeddings."""

import torch

from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.weight import Placement
from headrace.models.decoder import BlockOptions, DecoderLM
from headrace.models.spec import CausalLM, ModelSpec


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """The embeddings' scale is rounded to the precision of the weights, as when the model was trained."""
    scale = float(torch.tensor(config.hidden_size**0.5, dtype=placement.weight_dtype))
    options = BlockOptions(
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        embed_scale=scale,
    )
    return DecoderLM(config, options, placement)


def _unsupported(config: ModelConfig) -> list[str]:
    return ["bidirectional attention is not supported"] if config.raw.get("use_bidirectional_attention") else []


SPEC = ModelSpec("gemma3", ("gemma3_text",), build, unsupported=_unsupported)
