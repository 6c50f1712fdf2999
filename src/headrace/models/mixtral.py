"""Mixtral: Mistral with a mixture of experts in every layer."""

from headrace.checkpoint.model_config import ModelConfig
from headrace.errors import ModelError
from headrace.layers.moe import SparseMoe
from headrace.layers.weight import Placement
from headrace.models.decoder import BlockOptions, DecoderLM, Mlp
from headrace.models.spec import CausalLM, ModelSpec

_EXPERT_NAMES = (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """Raises ModelError for a config without experts."""
    return DecoderLM(config, BlockOptions(mlp=_mlp, mlp_name="block_sparse_moe"), placement)


def _mlp(config: ModelConfig, layer: int, placement: Placement) -> Mlp:
    if config.moe is None:
        raise ModelError("this mixtral config names no experts (num_local_experts)")
    return SparseMoe(config.hidden_size, config.moe, config.hidden_act, placement, renames=_EXPERT_NAMES)


SPEC = ModelSpec("mixtral", ("mixtral",), build)
