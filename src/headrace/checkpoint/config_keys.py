"""Typed access to a Hugging Face `config.json`, with each family's defaults for missing keys."""

import sys
from typing import Any, TypeVar

from headrace.checkpoint import foreign_config
from headrace.checkpoint.families import check_family, decoders
from headrace.errors import ModelError

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
"""Defaults of all text models; a family has its own before them."""

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
        decoder = decoders().get(model_type)
        if decoder is not None and decoder.common_names:
            self.config = {decoder.common_names.get(key, key): value for key, value in config.items()}
        if decoder is None:
            check_family(model_type, origin, config)
        self.is_foreign = decoder is None and foreign_config.is_known(model_type)
        known = foreign_config.common_fields(config, origin) if self.is_foreign else {}
        self.defaults = _COMMON | (known if decoder is None else dict(decoder.defaults))

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
