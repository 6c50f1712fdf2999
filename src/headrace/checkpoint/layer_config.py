"""What config.json says of layers: which of them see a sliding window, how they rotate, and what encoders of texts have that decoders have not."""

import math
from typing import Any, Literal, cast, get_args

import msgspec

from headrace.checkpoint.config_keys import ConfigKeys, is_finite, is_whole
from headrace.errors import ModelError

LayerType = Literal["full_attention", "sliding_attention", "chunked_attention"]

LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)

SlidingRule = Literal["all", "even", "pattern", "upper"]
"""Which layers slide where a config has no list: all of them, every other one from the first, all but each n-th by `sliding_window_pattern`, or those
from `max_window_layers` on, if `use_sliding_window` is set."""

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]

ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)
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


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The constants that decoders do not have.

    norm_eps, norm_bias: of LayerNorms. num_positions: rows of the table of positions, or positions that rotary embedding is made for.
    first_position: the row of a text's first token. num_token_types: rows of the table of token types, 0 = there is none.
    rope: of full layers, None = positions are a table. rope_local: of sliding layers. layer_types: one entry per layer.
    window: in a sliding layer token i sees token j where |i - j| <= window; 0 = no layer slides. attention_bias, mlp_bias: biases of linear layers.
    classifier_pooling: what the classification head reads. classifier_bias, classifier_act: of its hidden layer, where the family lets them vary.
    """

    norm_eps: float
    norm_bias: bool
    num_positions: int
    first_position: int = 0
    num_token_types: int = 0
    rope: RopeConfig | None = None
    rope_local: RopeConfig | None = None
    layer_types: tuple[LayerType, ...]
    window: int = 0
    attention_bias: bool
    mlp_bias: bool
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = True
    classifier_act: str = "gelu"


def window_and_types(keys: ConfigKeys, rule: SlidingRule, num_layers: int) -> tuple[int | None, tuple[LayerType, ...]]:
    """The sliding window in tokens (None when no layer slides) and the type of each layer."""
    window = keys.get("sliding_window")
    if ("use_sliding_window" in keys.config or rule == "upper") and not keys.get("use_sliding_window"):
        window = None
    if not is_whole(window) or not window:
        window = None
    types = _stated_types(keys, num_layers)
    if types is None:
        full, sliding, _ = LAYER_TYPES
        slides = [window is not None and _slides(keys, rule, layer) for layer in range(num_layers)]
        types = tuple(sliding if each else full for each in slides)
    if "full_attention" in types and "sliding_attention" not in types and "chunked_attention" not in types:
        window = None
    elif "sliding_attention" in types and window is None:
        raise ModelError(f"{keys.origin}: layer_types has sliding layers but sliding_window is not set")
    return window, types


def _stated_types(keys: ConfigKeys, num_layers: int) -> tuple[LayerType, ...] | None:
    stated = keys.get("layer_types")
    if stated is None:
        return None
    if not isinstance(stated, list) or not all(isinstance(kind, str) for kind in stated) or len(stated) < num_layers:
        raise ModelError(f"{keys.origin}: layer_types must name a kind for each of the {num_layers} layers")
    stated = ["full_attention" if kind == "attention" else kind for kind in stated[:num_layers]]
    others = sorted(set(stated) - set(LAYER_TYPES))
    if others:
        raise ModelError(
            f"{keys.origin}: model type {keys.config['model_type']} has layers of kind {', '.join(others)} (layer_types), which are not supported; "
            "only full_attention and sliding_attention are"
        )
    return tuple(stated)


def _slides(keys: ConfigKeys, rule: SlidingRule, layer: int) -> bool:
    """Whether a layer slides, in architectures that define it by a rule and not by a list."""
    if rule == "even":
        return layer % 2 == 0
    if rule == "pattern":
        name = "_sliding_window_pattern" if keys.get("_sliding_window_pattern") else "sliding_window_pattern"
        return bool((layer + 1) % keys.count(name))
    if rule == "upper":
        return layer >= (28 if keys.get("max_window_layers") is None else keys.count_or_none("max_window_layers"))
    return True


def full_and_sliding_rope(keys: ConfigKeys) -> tuple[RopeConfig, RopeConfig | None]:
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


def norm_eps(keys: ConfigKeys, constant: float | None = None) -> float:
    """Of the LayerNorms. constant: of a family whose code has it so, whatever the config says."""
    eps = keys.number("layer_norm_eps") if constant is None else constant
    if eps <= 0:
        raise ModelError(f"{keys.origin}: layer_norm_eps is {eps:g}; expected a number above 0")
    return eps
