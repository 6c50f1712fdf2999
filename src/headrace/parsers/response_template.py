"""The format that a checkpoint describes itself: `response_template` in its tokenizer's config, as a table for the machine.

The template names fields of the message, each with what opens and closes it. `content` is content, `thinking`, `reasoning` and
`reasoning_content` are reasoning, `tool_calls` are calls. Differences to transformers' own reader: nothing is lost (a text that has no field,
or comes in two places, is content; what cannot be read as a call is content as it was written), and JSON arguments are passed on as they are.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import regex

from headrace.parsers.call_readers import JsonCall
from headrace.parsers.parameters import coerced, properties, schema_types, to_json, without_surrogates
from headrace.parsers.program import marks
from headrace.parsers.table import Captures, Go, Kind, ReasoningTable, State, Table, ToolSchemas

_REASONING = ("thinking", "reasoning", "reasoning_content")
_CALLS = "tool_calls"
_PARSERS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines")
Field = Mapping[str, Any]


class UnsupportedTemplateError(ValueError):
    """A template that cannot be followed; its text says why."""


def tables_of(template: Mapping[str, object], special: Mapping[str, int]) -> tuple[Table, ReasoningTable | None]:
    """The tables of a template: reasoning between literal tags has one of its own. special: texts of added tokens and their ids.

    Raises UnsupportedTemplateError.
    """
    if template.get("version", 1) != 1:
        raise UnsupportedTemplateError(f"its version is {template.get('version')!r}")
    fields = template.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise UnsupportedTemplateError("it has no fields")
    anchors, anchor_patterns = _terminals(template, "start_anchor")
    if not anchors and not anchor_patterns:
        raise UnsupportedTemplateError("it has neither start_anchor nor start_anchor_pattern")
    anchor = "|".join(map(regex.escape, sorted(anchors, key=len, reverse=True)))
    literals: list[str] = []
    states: dict[str, State] = {}
    opens: dict[str, Go] = {}
    patterns: list[tuple[str, Go]] = []
    implicit = State(Kind.CONTENT)
    reasoning: ReasoningTable | None = None
    for name, field in fields.items():
        _check(name, field)
        begin, end = _terminals(field, "open"), _terminals(field, "close")
        kind = Kind.REASONING if name in _REASONING else Kind.CONTENT
        on = {text: Go("content") for text in end[0]}
        after = [(pattern, Go("content")) for pattern in end[1]]
        literals += [*begin[0], *end[0]]
        if not begin[0] and not begin[1]:
            if name == _CALLS:
                raise UnsupportedTemplateError(f"{name} has no begin mark")
            implicit = State(kind, on, patterns=after)
            continue
        if kind is Kind.REASONING and reasoning is None and begin[0] and end[0] and not begin[1] and not end[1]:
            reasoning = ReasoningTable("response_template", tuple(begin[0]), tuple(end[0]))
            continue
        opens.update((text, Go(f"field {name}")) for text in begin[0])
        patterns += [(pattern, Go(f"field {name}")) for pattern in begin[1]]
        if name != _CALLS:
            states[f"field {name}"] = State(kind, on, patterns=after)
        elif _is_plain_json(field) and not end[1]:
            states[f"field {name}"] = State(
                Kind.READER, reader=partial(JsonCall, argument_keys=("arguments",)), then="closing"
            )
            states["closing"] = State(Kind.SPACE, on)
        else:
            states[f"field {name}"] = State(Kind.REGION, on, read_calls=_region_reader(field), patterns=after)
    states["content"] = State(implicit.kind, implicit.on, patterns=(*patterns, *implicit.patterns))
    texts = [*literals, *(pattern.replace("\\", "") for state in states.values() for pattern, _ in state.patterns)]
    # Where a token is only a part of some terminal, all of them are read as text.
    is_text = any(text not in special and marks([text], special) for text in texts)
    has_reasoning = reasoning is None and any(name in _REASONING for name in fields)
    table = Table(
        "response_template",
        states,
        anchor=anchor_patterns[0] if anchor_patterns else anchor,
        is_text=is_text,
        has_tools=_CALLS in fields,
        has_reasoning=has_reasoning,
        opens=opens,
    )
    return table, reasoning


def _check(name: object, field: object) -> None:
    if not isinstance(field, Mapping):
        raise UnsupportedTemplateError(f"field {name!r} is not an object")
    if field.get("content", "text") not in _PARSERS:
        raise UnsupportedTemplateError(f"field {name!r} has the content {field['content']!r}")
    if name not in (_CALLS, "content", *_REASONING):
        raise UnsupportedTemplateError(f"the field {name!r} is not supported")
    if name != _CALLS and field.get("content", "text") != "text":
        raise UnsupportedTemplateError(f"field {name!r} is not text")


def _terminals(field: Field, name: str) -> tuple[list[str], list[str]]:
    """The literal texts and the regular expressions that open or close a field."""
    literal, pattern = field.get(name), field.get(f"{name}_pattern")
    texts = [literal] if isinstance(literal, str) else list(literal or ())
    if not all(isinstance(text, str) and text for text in texts):
        raise UnsupportedTemplateError(f"`{name}` must be a string or a list of strings")
    if pattern is None:
        return texts, []
    try:
        regex.compile(pattern, regex.DOTALL)
    except (regex.error, TypeError):
        raise UnsupportedTemplateError(f"`{name}_pattern` is not a regular expression") from None
    return texts, [pattern]


def _is_plain_json(field: Field) -> bool:
    """Whether a call is a JSON object of name and arguments, which can be passed on while it comes."""
    if field.get("content") != "json" or field.get("content_args") or field.get("transform_each"):
        return False
    transform = field.get("transform")
    function = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    whole: Sequence[object] = (
        None,
        "{content}",
        {"name": "{content.name}", "arguments": "{content.arguments}"},
    )
    return function in whole


def _region_reader(field: Field) -> Any:
    content, options = field.get("content", "text"), field.get("content_args") or {}
    transform, each = field.get("transform"), field.get("transform_each", False)

    def read(text: str, captures: Captures, schemas: ToolSchemas) -> list[tuple[str, str]]:
        value = parsed(text, content, options)
        if each:
            value = [transformed(transform, {**captures, **item}) for item in value]
        elif transform is not None:
            value = transformed(transform, {**captures, "content": value})
        return calls_of(value, schemas)

    return read


Json = Any
PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")


def parsed(text: str, kind: str, options: Mapping[str, Json]) -> Json:
    """The value of a text. kind: `text`, `int`, `float`, `bool`, `json`, `xml-inline` or `kv-lines`. Raises ValueError for what is none."""
    match kind:
        case "text":
            return _stripped(text, options)
        case "int":
            return int(_stripped(text, options))
        case "float":
            return float(_stripped(text, options))
        case "bool":
            return _stripped(text, options).lower() in ("true", "1")
        case "json":
            return _dialect_value(text, options)
        case "xml-inline":
            return _tag_values(text, options)
        case _:
            return _lines(text, options)


def _stripped(text: str, options: Mapping[str, Json]) -> str:
    return text.strip() if options.get("strip", True) else text


def _dialect_value(text: str, options: Mapping[str, Json]) -> Json:
    """JSON, or a dialect with bare keys (`unquoted_keys`) or other marks around strings (`string_delims`)."""
    strings: list[str] = []

    def kept(found: "regex.Match[str]") -> str:
        strings.append(next(group for group in found.groups() if group is not None))
        return f"\x01{len(strings) - 1}\x02"

    dialect = text
    delimiters = options.get("string_delims") or []
    if delimiters and not {"\x01", "\x02"} & set(text):
        between = "|".join(f"{regex.escape(begin)}(.*?){regex.escape(end)}" for begin, end in delimiters)
        dialect = regex.sub(between, kept, dialect, flags=regex.DOTALL)
    if options.get("unquoted_keys"):
        dialect = regex.sub(r"(?<=[{,])(\w+):", r'"\1":', dialect)
    dialect = (
        regex.sub("\x01([0-9]+)\x02", lambda found: json.dumps(strings[int(found[1])]), dialect) if strings else dialect
    )
    try:
        return json.loads(dialect)
    except (ValueError, RecursionError):
        if options.get("allow_non_json"):
            return _stripped(text, options)
        raise ValueError("no JSON") from None


def _inner(text: str, options: Mapping[str, Json]) -> Json:
    inner = options.get("value_parser")
    return text if inner is None else parsed(text, inner.get("name", "text"), inner.get("args", {}))


def _tag_values(text: str, options: Mapping[str, Json]) -> dict[str, Json]:
    values: dict[str, list[Json]] = {}
    for found in regex.finditer(options["tag_pattern"], text, flags=regex.DOTALL):
        groups = found.groupdict()
        values.setdefault(groups["key"], []).append(_inner(groups.get("value") or "", options))
    merges = options.get("merge_duplicates", False)
    return {key: found if merges and len(found) > 1 else found[-1] for key, found in values.items()}


def _lines(text: str, options: Mapping[str, Json]) -> dict[str, Json]:
    separator = options.get("kv_sep", ":")
    values = {}
    for line in text.split(options.get("line_sep", "\n")):
        key, found, value = _stripped(line, options).partition(separator)
        if found:
            values[_stripped(key, options)] = _inner(_stripped(value, options), options)
    return values


def transformed(transform: Json, scope: Mapping[str, Json]) -> Json:
    """A transform with its placeholders filled in. Raises ValueError for one that has no value."""
    match transform:
        case dict():
            return {key: transformed(value, scope) for key, value in transform.items()}
        case list():
            return [transformed(value, scope) for value in transform]
        case str() if found := PLACEHOLDER.fullmatch(transform):
            value: Json = scope
            for key in found[1].split("."):
                if not isinstance(value, Mapping) or key not in value:
                    raise ValueError(f"there is no {found[1]}")
                value = value[key]
            return value
        case _:
            return transform


def calls_of(value: Json, schemas: ToolSchemas) -> list[tuple[str, str]]:
    """Calls, as (name, JSON text of the arguments), in a value: one or a list, within `function` or not. Raises ValueError for anything else.

    Arguments that are strings become what the function's schema says.
    """
    calls = []
    for item in value if isinstance(value, list) else [value]:
        call = item.get("function", item) if isinstance(item, Mapping) else None
        name = call.get("name") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(name, str) or not name:
            raise ValueError("no call")
        arguments = call.get("arguments", call.get("parameters"))
        calls.append((without_surrogates(name), _arguments_text(arguments, schemas.get(name, {}))))
    if not calls:
        raise ValueError("no call")
    return calls


def _arguments_text(arguments: Json, schema: Mapping[str, object]) -> str:
    if arguments is None or arguments == "":
        return "{}"
    if isinstance(arguments, str):
        return without_surrogates(arguments)
    if not isinstance(arguments, Mapping):
        return to_json(arguments)
    known = properties(schema)
    written = (
        f"{to_json(key)}: {_argument(value, schema_types(known.get(key), schema))}" for key, value in arguments.items()
    )
    return "{" + ", ".join(written) + "}"


def _argument(value: Json, types: tuple[str, ...]) -> str:
    if isinstance(value, str) and types:
        return coerced(value, types)
    if isinstance(value, list) and types and "array" not in types:
        return "[" + ", ".join(_argument(item, types) for item in value) + "]"
    return to_json(value)
