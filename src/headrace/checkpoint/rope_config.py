"""Rotary embeddings as a config describes them, in every spelling."""

import math
from typing import Any, Literal, cast

import msgspec

from headrace.checkpoint.config_keys import ConfigKeys, is_finite
from headrace.checkpoint.layer_types import LAYER_TYPES
from headrace.errors import ModelError

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_LISTED_FACTORS = ("long_factor", "short_factor")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding of one kind of layer.

    scaling: the parameters of `rope_type` under their Hugging Face names (`factor`, `low_freq_factor`,
    `original_max_position_embeddings`, `beta_fast` ...), without the type and the theta. Empty for `default`.
    """

    theta: float = 10000.0
    rope_type: RopeType = "default"
    scaling: dict[str, Any] = {}
    partial_rotary_factor: float = 1.0


def full_and_sliding_rope(keys: ConfigKeys) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary parameters of full layers, and of sliding layers where the architecture has its own."""
    theta = keys.number("rope_theta")
    local = keys.optional_number("rope_local_base_freq")
    parameters = keys.optional_object("rope_parameters") or {}
    per_layer = {kind: parameters[kind] for kind in LAYER_TYPES if isinstance(parameters.get(kind), dict)}
    if per_layer:
        full = one_rope(keys, per_layer.get("full_attention", {}), theta)
        sliding = per_layer.get("sliding_attention")
        return full, None if sliding is None else one_rope(keys, sliding, theta if local is None else local)
    scaling = keys.optional_object("rope_scaling") or {}
    full = one_rope(keys, scaling | parameters, theta)
    # gemma3's scaling is for the full layers only: the local ones keep plain positions.
    return full, None if local is None else RopeConfig(theta=local)


def one_rope(keys: ConfigKeys, parameters: dict[str, Any], theta: float) -> RopeConfig:
    """Normalise one rope dict. theta: where it names none."""
    parameters = {
        key: value
        for key, value in parameters.items()
        if value is not None and key not in ("mrope_section", "mrope_interleaved")
    }
    kind = _rope_type(keys, parameters)
    if keys.is_foreign:
        parameters = {key: value for key, value in parameters.items() if _is_numeric(value)}
    for name, value in parameters.items():
        if not _is_numeric(value) or (isinstance(value, list) and name not in _LISTED_FACTORS):
            raise ModelError(f"{keys.origin}: {name} of the rope parameters is {value!r:.80}; expected a finite number")
    theta = float(parameters.pop("rope_theta", theta))
    if theta <= 0:
        raise ModelError(f"{keys.origin}: rope_theta is {theta:g}; expected a number above 0")
    partial = float(parameters.pop("partial_rotary_factor", keys.optional_number("partial_rotary_factor") or 1.0))
    _check_needed(keys, kind, parameters)
    if kind in ("yarn", "longrope"):
        original = keys.get("original_max_position_embeddings") or keys.count("max_position_embeddings")
        parameters.setdefault("original_max_position_embeddings", original)
    return RopeConfig(
        theta=theta,
        rope_type=kind,
        scaling={} if kind == "default" else parameters,
        partial_rotary_factor=partial,
    )


def _rope_type(keys: ConfigKeys, parameters: dict[str, Any]) -> RopeType:
    """Take the kind out of `parameters`; both `rope_type` and the older `type` name it."""
    kind = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    parameters.pop("type", None)
    if kind == "su":
        return "longrope"
    if kind == "mrope":  # of text it is the default; `MediaConfig.rope_sections` has what it means for images
        return "default"
    if kind in ROPE_TYPES:
        return cast(RopeType, kind)
    if keys.is_foreign:
        return "default"  # the family's own code rotates
    raise ModelError(f"{keys.origin}: rope type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")


def _check_needed(keys: ConfigKeys, kind: RopeType, parameters: dict[str, Any]) -> None:
    """Raises ModelError when a parameter is missing without which this kind means nothing."""
    factor = parameters.get("factor")
    if kind in ("linear", "dynamic", "yarn", "llama3") and not (
        isinstance(factor, int | float) and math.isfinite(factor) and factor > 0
    ):
        raise ModelError(f"{keys.origin}: rope type {kind} needs a factor above 0, got {factor!r}")
    if kind == "llama3":
        missing = {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"} - parameters.keys()
        if missing:
            raise ModelError(f"{keys.origin}: rope type llama3 lacks {', '.join(sorted(missing))}")


def _is_numeric(value: object) -> bool:
    """A flag, a finite number, or a list of finite numbers."""
    return all(map(is_finite, value)) if isinstance(value, list) else isinstance(value, bool) or is_finite(value)
