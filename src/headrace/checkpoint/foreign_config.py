"""Reads a config.json with transformers, for families that Headrace has no defaults for.

Owns making transformers' config object and reading the fields that the runtime needs, whatever the family calls them
(`n_head`, `n_embd`, ...). Does not decide whether the family can be served. transformers, and with it torch, is imported when a function is called.
"""

from typing import Any

from headrace.errors import ModelError

_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
    "sliding_window",
    "layer_types",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
_OURS = frozenset({"model_type", "architectures", "auto_map", "quantization_config"})
_MAX_REASON = 200


def transformers_config(raw: dict[str, Any], origin: str) -> Any:
    """transformers' config object. raw: of a config.json, with a model_type. Raises a one-line ModelError if transformers refuses it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    fields = {key: value for key, value in raw.items() if key not in _OURS}
    try:
        return AutoConfig.for_model(raw["model_type"], **fields)
    # The family's code runs here, on whatever the file contains.
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(str(error).split())
        if len(reason) > _MAX_REASON:
            reason = reason[: _MAX_REASON - 3] + "..."
        raise ModelError(
            f"{origin}: transformers does not accept it as a config of {raw['model_type']}: {reason}"
        ) from error


def is_known(model_type: str) -> bool:
    """Whether transformers has a config of this type."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def common_fields(raw: dict[str, Any], origin: str) -> dict[str, Any]:
    """The fields that the runtime reads, under their common names, with the family's own defaults for what the file leaves out.

    Fields that the family does not have are absent. Raises the errors of `transformers_config`.
    """
    config = transformers_config(raw, origin)
    # Each family's class has fields of its own, and maps the common names to them.
    fields: dict[str, Any] = {}
    for name in _FIELDS:
        try:
            fields[name] = getattr(config, name)
        except AttributeError:
            continue
        except RuntimeError as error:  # transformers wants this read per layer
            raise ModelError(
                f"{origin}: model type {raw['model_type']} has a different {name} in each layer, which is not supported"
            ) from error
    return fields
