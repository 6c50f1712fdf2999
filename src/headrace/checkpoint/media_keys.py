"""What the readers of vision and audio encoders in `config.json` share.

Owns typed access to keys whose defaults are not those of text models (`MediaKeys`), and the sizes of an encoder's layers (`TowerConfig`). Imports
neither torch nor transformers.
"""

from typing import Any

import msgspec

from headrace.checkpoint.config_keys import ConfigKeys
from headrace.errors import ModelError

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu")
GATED_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu")
"""Those that towers and projectors may have, by their Hugging Face names."""


class TowerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of an encoder.

    num_layers: those that are computed. norm_eps: of its LayerNorms or RMSNorms. full_layers: of a tower whose tokens see those of their window only,
    the layers in which they see the whole item.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str
    norm_eps: float
    full_layers: tuple[int, ...] = ()


class NotServedError(Exception):
    """The reason why a checkpoint is served without vision or audio."""


class MediaKeys(ConfigKeys):
    """Keys of a part of a config.json whose defaults the caller gives."""

    def __init__(self, config: dict[str, Any], origin: str) -> None:
        super().__init__(config, origin, {})
        self.defaults = {}  # none of those that text models share

    def must_be(self, name: str, *served: object, default: object) -> None:
        """Raises NotServedError if a key has another value than these."""
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
        """A key that is a number above 0."""
        value = self.optional_number(name)
        if value is not None and value <= 0:
            raise ModelError(f"{self.origin}: {name} is {value:g}; expected a number above 0")
        return default if value is None else value

    def says(self, name: str, default: bool) -> bool:
        """A key that is true or false."""
        return default if self.config.get(name) is None else self.flag(name)

    def act(self, name: str, default: str, gated: bool = False) -> str:
        """A key that is the name of an activation. Raises NotServedError for one that there is not."""
        found, known = self.name(name, default), GATED_ACTIVATIONS if gated else ACTIVATIONS
        if found not in known:
            raise NotServedError(f"{name} is {found!r:.80} in {self.origin}; those that are served: {', '.join(known)}")
        return found

    def heads(self, size: int, name: str, default: int, unit: int = 1) -> dict[str, Any]:
        """Fields of `TowerConfig` for heads that share `size` elements, a multiple of `unit` each."""
        heads = self.count(name, default=default)
        if size % heads or size // heads % unit:
            raise ModelError(f"{self.origin}: {heads} heads cannot share {size} elements, a multiple of {unit} each")
        return {"num_heads": heads, "head_dim": size // heads}

    def name(self, name: str, default: str) -> str:
        """A key that is a name."""
        value = self.config.get(name, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.origin}: {name} is {value!r:.80}; expected a name")
        return value
