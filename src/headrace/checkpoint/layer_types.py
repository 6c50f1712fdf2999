"""Which layers of a model attend to the whole context, and which to a sliding window."""

from typing import Literal

from headrace.checkpoint.config_keys import ConfigKeys
from headrace.checkpoint.families import decoders
from headrace.checkpoint.family import SlidingRule
from headrace.errors import ModelError

LayerType = Literal["full_attention", "sliding_attention", "chunked_attention"]

LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention", "chunked_attention")


def window_and_types(keys: ConfigKeys, model_type: str, num_layers: int) -> tuple[int | None, tuple[LayerType, ...]]:
    """The sliding window in tokens (None when no layer slides) and the type of each layer."""
    decoder = decoders().get(model_type)
    rule: SlidingRule = "all" if decoder is None else decoder.sliding
    window = _window(keys, rule)
    types = _stated_types(keys, model_type, num_layers)
    if types is None:
        types = tuple(_ruled_type(keys, rule, layer, window) for layer in range(num_layers))
    if "full_attention" in types and "sliding_attention" not in types and "chunked_attention" not in types:
        window = None
    elif "sliding_attention" in types and window is None:
        raise ModelError(f"{keys.origin}: layer_types has sliding layers but sliding_window is not set")
    return window, types


def _window(keys: ConfigKeys, rule: SlidingRule) -> int | None:
    """Window of the sliding layers, if any, in tokens."""
    window = keys.get("sliding_window")
    if "use_sliding_window" in keys.config or rule == "upper":
        window = window if keys.get("use_sliding_window") else None
    return window if window and isinstance(window, int) and not isinstance(window, bool) else None


def _stated_types(keys: ConfigKeys, model_type: str, num_layers: int) -> tuple[LayerType, ...] | None:
    """The types in the list `layer_types`; None without one."""
    stated = keys.get("layer_types")
    if stated is None:
        return None
    if not isinstance(stated, list) or not all(isinstance(kind, str) for kind in stated) or len(stated) < num_layers:
        raise ModelError(f"{keys.origin}: layer_types must name a kind for each of the {num_layers} layers")
    stated = ["full_attention" if kind == "attention" else kind for kind in stated[:num_layers]]
    others = sorted(set(stated) - set(LAYER_TYPES))
    if others:
        raise ModelError(
            f"{keys.origin}: model type {model_type} has layers of kind {', '.join(others)} (layer_types), which are not supported; "
            "only full_attention and sliding_attention are"
        )
    return tuple(stated)


def _ruled_type(keys: ConfigKeys, rule: SlidingRule, layer: int, window: int | None) -> LayerType:
    return "sliding_attention" if window is not None and _slides(keys, rule, layer) else "full_attention"


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
