"""Bodies of requests before they are decoded: fields that request nothing, `8.0` for `8`, and what is wrong with a body, in the client's words.

Owns the one table of other servers' fields (`NEUTRAL`). An unknown field is ignored at `null`, `false`, `""`, `[]` and `{}`, and at the default
of the API that it comes from. At any other value it requests something, so it stays in the body, where the decoder refuses it by name. Pure
functions; any process.
"""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import inspect

from headrace.errors import RequestError
from headrace.plain_types import AT_FIELD, plain_types

T = TypeVar("T")


@dataclass(slots=True)
class Place:
    """Where a value is, and what it may be there.

    required: it must be given. takes_whole: integers, but no other numbers. words: the values of a Literal. takes_words: these, and no other text.
    is_closed: an object whose unknown fields are refused. fields: of an object with known fields; None = it has none. items, values: of a list
    and of an object with any fields.
    """

    required: bool
    takes_null: bool = False
    takes_list: bool = False
    takes_object: bool = False
    takes_whole: bool = False
    words: tuple[object, ...] = ()
    takes_words: bool = False
    is_closed: bool = False
    fields: "Mapping[str, Place] | None" = None
    items: "Place | None" = None
    values: "Place | None" = None


@functools.cache
def place_of(kind: object) -> Place:
    """The place of a whole body of type `kind`, a Struct."""
    return _place(inspect.type_info(kind), True)


def _place(kind: inspect.Type, required: bool) -> Place:
    place, takes_float, takes_text = Place(required), False, False
    for one in alternatives(kind):
        match one:
            case inspect.AnyType():
                place.takes_null = place.takes_list = place.takes_object = takes_float = takes_text = True
            case inspect.NoneType():
                place.takes_null = True
            case inspect.IntType():
                place.takes_whole = True
            case inspect.FloatType():
                takes_float = True
            case inspect.StrType():
                takes_text = True
            case inspect.LiteralType(values=values):
                place.words += values
                place.takes_whole |= any(type(value) is int for value in values)
            case inspect.ListType(item_type=inner):
                place.takes_list, place.items = True, _place(inner, True)
            case inspect.DictType(value_type=inner):
                place.takes_object, place.values = True, _place(inner, True)
            case inspect.StructType(fields=inner):
                place.takes_object, place.is_closed = True, one.forbid_unknown_fields
                place.fields = {one.encode_name: _place(one.type, one.required) for one in inner}
    place.takes_whole &= not takes_float
    place.takes_words = bool(place.words) and not takes_text
    return place


def alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union, or the one type; without their bounds."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from alternatives(each)
    else:
        yield kind


_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")


def allowed_values(kind: object, path: str) -> tuple[object, ...]:
    """The `Literal` values accepted at `path` (e.g. `tags[0]`) in a body of type `kind`; empty if there are none."""
    return tuple(word for place in _at(kind, path) for word in place.words)


def field_names(kind: object, path: str) -> list[str]:
    """The fields at `path` in a body of type `kind`, then those of the objects that these hold (`sampling_params.temperature`)."""
    own = [field for place in _at(kind, path) for field in (place.fields or {}).items()]
    return [name for name, _ in own] + [f"{name}.{held}" for name, inner in own for held in inner.fields or ()]


def _at(kind: object, path: str) -> list[Place]:
    found = [place_of(kind)]
    for step in _STEP.findall(path):
        inside = [(each.items, each.values) if step[0] == "[" else ((each.fields or {}).get(step),) for each in found]
        found = [place for places in inside for place in places if place is not None]
    return found


_UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"missing required field `(.*?)`", re.DOTALL)
_WRONG_VALUE = re.compile(r"invalid enum value (.*)", re.DOTALL)

_FRACTION = re.compile(r"(`(?=[^`]*\bint\b)(?![^`]*\bfloat\b)[^`]*`), got `float`")
"""Where an integer is taken, `as_meant` has left only floats that are none."""

_LIMITS = (
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "num_predict",
    "n_predict",
)
"""What APIs call the most tokens of an output."""


def field_error(text: str, kind: object) -> RequestError:
    """The RequestError for `text`, msgspec's message about a value that is no `kind`; `param` is the field as the client wrote it."""
    path = found[1] if (found := AT_FIELD.search(text)) else ""
    reason = AT_FIELD.sub("", text)
    if field := _UNKNOWN_FIELD.search(reason):
        name = _join(path, field[1])
        near = _nearest(field[1], field_names(kind, path))
        meant = f"; did you mean {_join(path, near)!r}?" if near else ""
        return RequestError(f"unknown field {_shorten(name)!r}{meant}", _shorten(name), "unknown_field")
    if field := _MISSING_FIELD.search(reason):
        name = _join(path, field[1])
        return RequestError(f"missing field {name!r}", name, "missing_field")
    reason = reason[:1].lower() + reason[1:]
    if (value := _WRONG_VALUE.fullmatch(reason)) and (allowed := allowed_values(kind, path)):
        reason = f"{_shorten(value[1])} is not one of {', '.join(map(repr, allowed))}"
    else:
        reason = plain_types(_FRACTION.sub(r"\1, got a number with a fraction", reason))
    where = _shorten(path)
    return RequestError(f"{where}: {reason}" if where else f"the body is not as expected: {reason}", where or None)


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """The one of `names`, paths of fields, that is most likely meant by `name`."""
    if len(name) > 100:
        return None
    by_last = {path.rpartition(".")[2]: path for path in reversed(names)}
    same = _LIMITS if name in _LIMITS else (name,)
    near = [other for other in same if other in by_last] or difflib.get_close_matches(name, by_last, 1, 0.75)
    return by_last[near[0]] if near else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shorten(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + "..."


def converted(fields: object, kind: type[T]) -> T:
    """A body of Python values as a Struct, see `as_meant`. Raises RequestError that names the field."""
    try:
        return msgspec.convert(as_meant(fields, kind), kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind) from None


def as_meant(body: object, kind: object) -> object:
    """`body` (of JSON types) as it is meant where it is decoded as `kind`, a Struct. `body` itself is not changed.

    Integers stand for floats without a fraction, where integers and no other numbers are taken. Unknown fields that request nothing are left out,
    and null, [], {} and (for a Literal) "" where an optional known field does not accept them. Nested structs are treated in the same way; what a
    client may write freely (tools, schemas, arguments of a template) stays as it is.
    """
    return _as_meant(body, place_of(kind))


def _as_meant(value: object, place: Place) -> object:
    if isinstance(value, float):
        return int(value) if place.takes_whole and value.is_integer() else value
    if isinstance(value, (list, tuple)) and place.items is not None:
        # Prompts are lists of up to a million ids: their types are looked at by C alone.
        if not {float, list, tuple, dict}.intersection(map(type, value)):
            return value
        return [_as_meant(item, place.items) for item in value]
    if not isinstance(value, dict):
        return value
    fields, values = place.fields, place.values
    if fields is None:
        return value if values is None else {name: _as_meant(item, values) for name, item in value.items()}
    kept = {}
    for name, item in value.items():
        inner = fields.get(name)
        if inner is None:
            if not asks_for_nothing(name, item):
                kept[name] = item
        elif inner.required or not _is_left_out(item, inner):
            kept[name] = _as_meant(item, inner)
    return kept


def _is_left_out(value: object, place: Place) -> bool:
    """Whether `value` is an empty value that is not accepted there."""
    if value is None:
        return not place.takes_null
    if value == "":
        return place.takes_words
    if isinstance(value, list) and not value:
        return place.takes_object and not place.takes_list
    if isinstance(value, dict) and not value:
        return place.takes_list and not place.takes_object
    return False


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


def _same(value: object, neutral: object) -> bool:
    """Whether both are equal; true does not equal 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
