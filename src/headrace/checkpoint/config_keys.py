"""Typed access to a Hugging Face `config.json`, with each architecture's defaults for missing keys.

The defaults are those of transformers.
"""

import sys
from typing import Any, TypeVar

from headrace.checkpoint import foreign_config
from headrace.checkpoint.families import check_family
from headrace.errors import ModelError

# Defaults of each architecture. Keys with the same default for all are in `_COMMON`.
_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN: dict[str, Any] = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_QWEN_VL: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "attention_bias": True,
}
_QWEN_MOE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "decoder_sparse_step": 1,
}
_GEMMA: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA2: dict[str, Any] = _GEMMA | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mixtral": {
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
    "qwen2": _QWEN | {"num_key_value_heads": 32, "attention_bias": True},
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen3_vl_text": {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rope_theta": 5e5,
    },
    "qwen3": _QWEN | {"num_key_value_heads": 32, "head_dim": 128},
    "qwen2_moe": _QWEN_MOE
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "attention_bias": True,
    },
    "qwen3_moe": _QWEN_MOE
    | {
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "gemma": _GEMMA
    | {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gemma2": _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA2
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
    },
    "phi3": {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
    },
}

T = TypeVar("T")


class ConfigKeys:
    """Typed access to one config dict, falling back to the architecture's defaults.

    defaults: of an architecture that is not a decoder; None = those of the decoder that the config names.
    """

    def __init__(self, config: dict[str, Any], origin: str, defaults: dict[str, Any] | None = None) -> None:
        self.config = config
        self.origin = origin
        self.is_foreign = False
        if defaults is not None:
            self.defaults = _COMMON | defaults
            return
        model_type = config["model_type"]
        if model_type not in _DEFAULTS:
            check_family(model_type, origin, config)
        self.is_foreign = model_type not in _DEFAULTS and foreign_config.is_known(model_type)
        known = foreign_config.common_fields(config, origin) if self.is_foreign else _DEFAULTS.get(model_type, {})
        self.defaults = _COMMON | known

    def get(self, key: str) -> Any:
        """The value of `key`, or the architecture's default, or None."""
        value = self.config.get(key)
        return self.defaults.get(key) if value is None and key not in self.config else value

    def count(self, key: str, default: int | None = None, only_shown: bool = False) -> int:
        """A whole number >= 1; a key that is absent or null takes the architecture's default, then `default`.

        only_shown: for display only, since the model's code reads the config itself; an invalid value counts as 1.
        """
        value = self.get(key)
        if only_shown and not (isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31):
            return 1
        if value is None:
            value = self.defaults.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ModelError(f"{self.origin}: {key} is {value!r}; expected a positive whole number")
        return value

    def count_or_none(self, key: str) -> int:
        """A whole number >= 0; absent or null is 0."""
        value = self.get(key)
        return 0 if value is None or (value == 0 and type(value) is int) else self.count(key)

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.optional_number(key)
        if value is None:
            raise ModelError(f"{self.origin}: {key} is missing")
        return value

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None when absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not is_finite(value):
            raise ModelError(f"{self.origin}: {key} is {value!r}; expected a finite number")
        return float(value)

    def listed(self, key: str, kind: type[T], words: str) -> tuple[T, ...]:
        """The values of a list, all of type `kind`; absent or null is none. words: describes them in error messages."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ModelError(f"{self.origin}: {key} is {value!r:.80}; expected a list of {words}")
        return tuple(value)

    def optional_object(self, key: str) -> dict[str, Any] | None:
        """An object, or None when absent or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"{self.origin}: {key} is {value!r:.80}; expected an object")
        return value

    def flag(self, key: str) -> bool:
        """A boolean; absent or null is False."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.origin}: {key} is {value!r}; expected true or false")
        return bool(value)

    def token(self, key: str) -> int | None:
        """A token id, or None. A list (as some configs write bos) gives its first; -1 means none."""
        value = self.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            return None
        return value


def is_finite(value: object) -> bool:
    """A number that a float can hold; whole numbers of a JSON file may be larger."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < sys.float_info.max
