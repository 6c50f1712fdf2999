"""Fields that request nothing: those that clients of other servers spell out, and those that can be dropped without an effect.

Owns the one table of other servers' fields (`NEUTRAL`) and the walk over a body that uses it. An unknown field is
ignored at `null`, `false`, `""`, `[]` and `{}`, and at the default of the API that it comes from. At any other value it requests
something, so it stays in the body, where the decoder refuses it by name. Pure functions; any process.
"""

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from msgspec import inspect

from headrace.messages.allowed_values import alternatives

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # SGLang
    "log_metrics": (True,),
    "stream_reasoning": (True, False),
    "return_flat_raw_top_logprobs_b64": (True, False),
    "return_documents": (True,),
    "routed_experts_start_len": (0,),
    "stop_str_max_len": (0,),
    "stop_regex_max_len": (0,),
    "token_step": (0,),
    "torch_empty_cache": (True, False),
    "selector": ("all",),
    "model": ("default", "unknown"),
    "logprob_start_len": (-1, 0),
    "top_logprobs_num": (0,),
    "n": (1,),
    "seed": (-1,),
    "sampling_seed": (-1,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "chat_template_kwargs": ({"enable_thinking": False},),
    # vLLM
    "include_reasoning": (True,),
    "return_mm_kwargs": (True, False),
    "detokenize": (True,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "length_penalty": (1.0,),
    "thinking_token_budget": (-1,),
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "guided_decoding_backend": ("auto",),
    "routed_experts_prompt_start": (0,),
    # OpenAI: chat fields that other routes do not know
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "prompt_cache_options": ({"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"}),
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "best_of": (1,),
    "top_logprobs": (0,),
    "add_generation_prompt": (True,),
    "separate_reasoning": (True, False),
    # llama.cpp's server
    "n_predict": (-1,),
    "n_cmpl": (1,),
    "n_keep": (0,),
    "n_discard": (0,),
    "n_indent": (0,),
    "n_probs": (0,),
    "n_cache_reuse": (0,),
    "min_keep": (0,),
    "id_slot": (-1,),
    "cache_prompt": (True,),
    "t_max_prompt_ms": (-1, 0),
    "t_max_predict_ms": (-1, 0),
    "sse_ping_interval": (-1, 30),
    "samplers": (
        ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ),
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "top_n_sigma": (-1.0,),
    "dynatemp_range": (0.0,),
    "dynatemp_exponent": (1.0,),
    "repeat_penalty": (1.0,),
    "repeat_last_n": (64,),
    "dry_multiplier": (0.0,),
    "dry_base": (1.75,),
    "dry_allowed_length": (2,),
    "dry_penalty_last_n": (-1, 0, 64),
    "dry_sequence_breakers": (["\n", ":", '"', "*"],),
    "xtc_probability": (0.0,),
    "xtc_threshold": (0.1,),
    "mirostat": (0,),
    "mirostat_tau": (5.0,),
    "mirostat_eta": (0.1,),
    "adaptive_target": (-1.0,),
    "adaptive_decay": (0.9,),
    "parse_special": (True,),
    "reasoning_format": ("auto", "none", "deepseek"),
    "reasoning_budget_tokens": (-1,),
    "thinking_budget_tokens": (-1,),
    "parse_tool_calls": (True, False),
    "speculative.n_max": (16,),
    "speculative.n_min": (0, 5),
    "speculative.p_min": (0.75, 0.9),
}
"""Fields of other APIs, each with the non-empty values at which it requests nothing.

Where a route knows the field itself, the route decides and not this table.
"""

ASKS_WHEN_EMPTY = frozenset(
    {
        "add_special_tokens",
        "cache_prompt",
        "detokenize",
        "include_reasoning",
        "parse_special",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)
"""Fields for which `false` requests something, because their default is true."""


def is_empty(value: object) -> bool:
    """Whether `value` is null, false, "", [] or {}."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def asks_for_nothing(name: str, value: object) -> bool:
    """Whether an unknown field called `name` can be ignored at `value`."""
    if is_empty(value):
        return value is None or name not in ASKS_WHEN_EMPTY
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
    return any(_same(value, neutral) for neutral in NEUTRAL.get(name, ()))


def without_neutral(body: object, kind: type[Any]) -> object:
    """`body` (of JSON types) without the fields that can be ignored when it is decoded as `kind`, a Struct.

    Dropped are unknown fields that request nothing, and null, [], {} and (for a Literal) "" where an optional known field does not
    accept them. Nested structs are treated in the same way. `body` itself is not changed.
    """
    return _pruned(body, _shape_of(cast(Hashable, kind)))


@dataclass(slots=True)
class _Field:
    """What a field accepts. takes_words: only a few words (a Literal). inner: fields of the struct it holds, alone or in a list; None = no struct."""

    required: bool
    takes_null: bool
    takes_list: bool
    takes_object: bool
    takes_words: bool
    inner: "_Shape | None"


_Shape = Mapping[str, _Field]


def _pruned(value: object, shape: _Shape) -> object:
    if isinstance(value, list):
        return [_pruned(item, shape) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        field = shape.get(name)
        if field is None:
            if not asks_for_nothing(name, item):
                kept[name] = item
        elif field.required or not _is_left_out(item, field):
            kept[name] = item if field.inner is None else _pruned(item, field.inner)
    return kept


def _is_left_out(value: object, field: _Field) -> bool:
    """Whether `value` is an empty value that the field does not accept."""
    if value is None:
        return not field.takes_null
    if value == "":
        return field.takes_words
    if isinstance(value, list) and not value:
        return field.takes_object and not field.takes_list
    if isinstance(value, dict) and not value:
        return field.takes_list and not field.takes_object
    return False


@functools.cache
def _shape_of(kind: Hashable) -> _Shape:
    """The fields of a Struct by their names in bodies."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType), f"{kind} is no struct"
    return {field.encode_name: _field(field) for field in described.fields}


def _field(field: inspect.Field) -> _Field:
    kinds = list(alternatives(field.type))
    structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
    lists = [kind for kind in kinds if isinstance(kind, inspect.ListType)]
    for items in lists:
        structs += [item for item in alternatives(items.item_type) if isinstance(item, inspect.StructType)]
    return _Field(
        required=field.required,
        takes_null=any(isinstance(kind, (inspect.NoneType, inspect.AnyType)) for kind in kinds),
        takes_list=bool(lists) or any(isinstance(kind, inspect.AnyType) for kind in kinds),
        takes_object=any(isinstance(kind, (inspect.DictType, inspect.StructType, inspect.AnyType)) for kind in kinds),
        takes_words=any(isinstance(kind, inspect.LiteralType) for kind in kinds)
        and not any(isinstance(kind, (inspect.StrType, inspect.AnyType)) for kind in kinds),
        inner=_shape_of(structs[0].cls) if structs else None,
    )


def _same(value: object, neutral: object) -> bool:
    """Whether both are equal; true does not equal 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
