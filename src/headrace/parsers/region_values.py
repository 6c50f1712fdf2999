"""What the text of a call's region becomes, as a checkpoint's `response_template` says: JSON with dialects, tags, or lines."""

import json
from collections.abc import Mapping
from typing import Any

import regex

from headrace.parsers.parameters import coerced, schema_types, to_json, without_surrogates
from headrace.parsers.table import ToolSchemas

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
            return _json(text, options)
        case "xml-inline":
            return _tags(text, options)
        case _:
            return _lines(text, options)


def _stripped(text: str, options: Mapping[str, Json]) -> str:
    return text.strip() if options.get("strip", True) else text


def _json(text: str, options: Mapping[str, Json]) -> Json:
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


def _tags(text: str, options: Mapping[str, Json]) -> dict[str, Json]:
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
    properties = schema.get("properties")
    types = {
        key: schema_types(properties.get(key) if isinstance(properties, Mapping) else None, schema) for key in arguments
    }
    return "{" + ", ".join(f"{to_json(key)}: {_argument(value, types[key])}" for key, value in arguments.items()) + "}"


def _argument(value: Json, types: tuple[str, ...]) -> str:
    if isinstance(value, str) and types:
        return coerced(value, types)
    if isinstance(value, list) and types and "array" not in types:
        return "[" + ", ".join(_argument(item, types) for item in value) + "]"
    return to_json(value)
