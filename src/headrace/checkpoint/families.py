"""Finds the families of `headrace.families` by the names of their modules, and says which model types cannot be served, in milliseconds and without
importing torch or transformers. What else a model must fulfil is checked when it is built (`models.registry`). Used in any process.
"""

import ast
import dataclasses
import functools
import importlib.util
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from headrace.checkpoint.family import Family
from headrace.errors import ModelError

_FAMILIES = "headrace.families"  # the package of the families: above this room, so they are imported by name
_STATE = "a state beside attention that is kept from token to token (linear attention, recurrences, convolutions)"
_NEEDS: dict[str, str] = {
    _STATE: (
        "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h "
        "olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2"
    ),
    "attention sinks": "flint gpt_oss granite_swa granitemoe_swa",
    "multi-head latent attention, whose keys and values differ in size": (
        "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite longcat_flash minicpm3 youtu"
    ),
    "sparse attention": "axk2 deepseek_v32 deepseek_v4 glm_moe_dsa",
    "attention in chunks": "llama4 llama4_text",
    "heads of a different size in each layer": "gemma4 gemma4_text gemma4_unified gemma4_unified_text",
}
"""Needs that Headrace does not meet, with the model types that have them."""

_LIST = "models/auto/modeling_auto.py"
_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
"""Where transformers lists them."""

ATTENTION_KINDS = ("attention", "full_attention", "sliding_attention")
"""How configs call layers that attend. `attention` is an older name of `full_attention`."""

_LACKS = {model_type: need for need, names in _NEEDS.items() for model_type in names.split()}


@functools.cache
def families() -> Mapping[str, Family]:
    names = sorted(module.name for module in pkgutil.iter_modules(import_module(_FAMILIES).__path__))
    return {name: import_module(f"{_FAMILIES}.{name}").FAMILY for name in names}


@functools.cache
def all_families() -> Family:
    """What all of them say, as if they were one."""
    found = families().values()
    return Family(
        **{
            field.name: {name: own for family in found for name, own in getattr(family, field.name).items()}
            for field in dataclasses.fields(Family)
        }
    )


def code(model_type: str, part: Literal["vision", "audio"]) -> ModuleType:
    """The module that has the encoder of a model type with images or sounds. It imports torch."""
    name = next(name for name, family in families().items() if model_type in getattr(family, part))
    return import_module(f"{_FAMILIES}.{name}.{part}")


@functools.cache
def native_types() -> frozenset[str]:
    """Model types of text models with an implementation of our own."""
    return frozenset(
        model_type for model_type, decoder in all_families().decoders.items() if decoder.options is not None
    )


def check_family(model_type: str, origin: str, config: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Refuse a model that by its type surely cannot be served. Raises ModelError, in one line.

    origin: name of the source in error messages. config: of the model. A family that mixes attention with layers of another kind may have
    models without these.
    """
    lacks = _LACKS.get(model_type)
    if lacks is not None and not (lacks == _STATE and _attends_everywhere(config)):
        raise _refusal(model_type, origin, f"it needs {lacks}")
    others = _transformers_types()
    if others is not None and model_type not in native_types() | others:
        own = ", and the checkpoint's own code is not run" if config.get("auto_map") else ""
        raise _refusal(
            model_type, origin, f"neither Headrace nor transformers has a causal language model of this type{own}"
        )


def _attends_everywhere(config: Mapping[str, Any]) -> bool:
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        return False
    for key in ("layer_types", "layers_block_type"):
        kinds = config.get(key)
        if isinstance(kinds, list):
            return len(kinds) >= num_layers and all(kind in ATTENTION_KINDS for kind in kinds[:num_layers])
    if 1 in (config.get("full_attention_interval"), config.get("attn_layer_period")):
        return True
    attending = config.get("attn_layer_indices") or config.get("full_attn_idxs")
    return isinstance(attending, list) and all(layer in attending for layer in range(num_layers))


def _refusal(model_type: str, origin: str, why: str) -> ModelError:
    shown = (name for name in native_types() if not all_families().decoders[name].is_inner)
    return ModelError(
        f"{origin}: model type {model_type!r:.80} is not supported: {why}. Supported are {', '.join(sorted(shown))} and what docs/models.md lists; "
        f"encoders: {', '.join(sorted(all_families().encoders))}"
    )


@functools.cache
def _transformers_types() -> frozenset[str] | None:
    """The model types of which transformers has a causal language model; None if its list is not where it was."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return None
    try:
        module = ast.parse((Path(found.origin).parent / _LIST).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    tables = [
        statement.value
        for statement in module.body
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [_TABLE]
    ]
    # Beside the types it holds names of classes, which no type has.
    texts = [node.value for table in tables for node in ast.walk(table) if isinstance(node, ast.Constant)]
    return frozenset(text for text in texts if isinstance(text, str)) or None
