"""Typed access to a Hugging Face `config.json` or a part of it, and the fields of those that only transformers knows.

Which keys there are, and their defaults, say the callers (`model_config.py`, the families). transformers, and with it torch, is imported when a
function that needs it is called.
"""

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar

from headrace.errors import ModelError

COMMON_DEFAULTS: dict[str, Any] = {
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
"""Defaults of all text models; a family has its own before them."""

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu")
GATED_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu")
"""Those that vision and audio encoders and projectors may have, by their Hugging Face names."""

T = TypeVar("T")


class NotServedError(Exception):
    """The reason why a checkpoint is served without vision or audio."""


class ConfigKeys:
    """The keys of one config dict; one that is absent has its default. Methods raise ModelError that names origin and key. is_foreign: the model's
    code, which is transformers', reads the config itself."""

    def __init__(
        self, config: dict[str, Any], origin: str, defaults: Mapping[str, Any] | None = None, is_foreign: bool = False
    ) -> None:
        self.config = config
        self.origin = origin
        self.defaults = defaults or {}
        self.is_foreign = is_foreign

    def get(self, key: str) -> Any:
        """The value of `key`, or its default, or None."""
        return self.config.get(key, self.defaults.get(key))

    def count(self, key: str, default: int | None = None, only_shown: bool = False) -> int:
        """A whole number >= 1; a key that is absent has its default, else, or where it is null, `default`. only_shown: for display only, since
        the model's code reads the config itself; an invalid value counts as 1."""
        value = self.get(key)
        if value is None and not only_shown:
            value = default or self.defaults.get(key)
        if is_whole(value) and 0 < value < 2**31:
            return value
        if only_shown:
            return 1
        raise ModelError(f"{self.origin}: {key} is {value!r}; expected a positive whole number")

    def count_or_none(self, key: str) -> int:
        """A whole number >= 0; absent or null is 0."""
        value = self.get(key)
        return 0 if value is None or (value == 0 and is_whole(value)) else self.count(key)

    def number(self, key: str) -> float:
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
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.origin}: {key} is {value!r}; expected true or false")
        return bool(value)

    def token(self, key: str) -> int | None:
        """A token id, or None. A list (as some configs write bos) gives its first; -1 means none."""
        value = self.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        return value if is_whole(value) and value >= 0 else None


class MediaKeys(ConfigKeys):
    """Keys of the parts of a config.json around the text model, whose defaults the caller gives."""

    def must_be(self, name: str, *served: object, default: object) -> None:
        value = self.config.get(name, default)
        if value not in served:
            known = " or ".join(repr(each) for each in served)
            raise NotServedError(f"{name} is {value!r:.80} in {self.origin}; only {known} is served")

    def side(self, name: str, default: int) -> int:
        """A key that is the side of a square, or both of its sides."""
        value = self.config.get(name, default)
        sides = value if isinstance(value, list) and len(value) == 2 else [value]
        if sides[0] != sides[-1]:
            raise NotServedError(f"{name} is {value!r:.80} in {self.origin}; only squares are served")
        return MediaKeys({name: sides[0]}, self.origin).count(name, default=default)

    def positive(self, name: str, default: float) -> float:
        value = self.optional_number(name)
        if value is not None and value <= 0:
            raise ModelError(f"{self.origin}: {name} is {value:g}; expected a number above 0")
        return default if value is None else value

    def says(self, name: str, default: bool) -> bool:
        return default if self.config.get(name) is None else self.flag(name)

    def numbers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return default if self.config.get(name) is None else self.listed(name, int, "integers")

    def act(self, name: str, default: str, gated: bool = False) -> str:
        found, known = self.name(name, default), GATED_ACTIVATIONS if gated else ACTIVATIONS
        if found not in known:
            raise NotServedError(f"{name} is {found!r:.80} in {self.origin}; those that are served: {', '.join(known)}")
        return found

    def heads(self, size: int, name: str, default: int, unit: int = 1) -> dict[str, Any]:
        """Fields of `media_config.TowerConfig` for heads that share `size` elements, a multiple of `unit` each."""
        heads = self.count(name, default=default)
        if size % heads or size // heads % unit:
            raise ModelError(f"{self.origin}: {heads} heads cannot share {size} elements, a multiple of {unit} each")
        return {"num_heads": heads, "head_dim": size // heads}

    def name(self, name: str, default: str) -> str:
        value = self.config.get(name, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.origin}: {name} is {value!r:.80}; expected a name")
        return value


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """A number that a float can hold; whole numbers of a JSON file may be larger."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < sys.float_info.max


_FOREIGN_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim max_position_embeddings "
    "rms_norm_eps hidden_act tie_word_embeddings sliding_window layer_types rope_parameters bos_token_id eos_token_id pad_token_id "
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size"
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


def transformers_knows(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def common_fields(raw: dict[str, Any], origin: str) -> dict[str, Any]:
    """The fields that the runtime reads, under their common names, with the family's own defaults for what the file leaves out. Fields that the
    family does not have are absent. Raises the errors of `transformers_config`."""
    config = transformers_config(raw, origin)
    # Each family's class has fields of its own, and maps the common names to them.
    fields: dict[str, Any] = {}
    for name in _FOREIGN_FIELDS.split():
        try:
            fields[name] = getattr(config, name)
        except AttributeError:
            continue
        except RuntimeError as error:  # transformers wants this read per layer
            raise ModelError(
                f"{origin}: model type {raw['model_type']} has a different {name} in each layer, which is not supported"
            ) from error
    return fields
