"""The least memory that a model takes, from its configuration alone. Pure; used before anything is loaded."""

from headrace.checkpoint.families import native_types
from headrace.checkpoint.model_config import ModelConfig


def least_weight_bytes(model: ModelConfig, itemsize: float) -> int:
    """A lower bound of the bytes of the weights. itemsize: bytes of a weight of a linear layer.

    0 for families that Headrace does not implement itself: their matrices may have other shapes.
    """
    if model.model_type not in native_types():
        return 0
    attention = 2 * model.hidden_size * (model.num_q_heads + model.num_kv_heads) * model.head_dim
    num_weights = model.hidden_size * model.vocab_size
    for layer in range(model.num_layers):
        num_weights += attention + 3 * model.hidden_size * _intermediate_size(model, layer)
    return int(num_weights * itemsize)


def least_kv_bytes(model: ModelConfig, num_tokens: int) -> int:
    """A lower bound of the bytes of a KV cache: in int8, without the scales."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * num_tokens


def _intermediate_size(model: ModelConfig, layer: int) -> int:
    """Of all experts together."""
    if model.moe is not None and model.moe.is_sparse(layer):
        return model.moe.num_experts * model.moe.intermediate_size
    return model.intermediate_size
