"""Arguments that are written as text between tags, as JSON: each parameter's value becomes what its schema says."""

import json
import re
from collections.abc import Mapping
from urllib.parse import unquote

from headrace.parsers.table import ValueType

Schema = Mapping[str, object]

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_DIGITS = 400
"""Longer numbers stay text: they fit no type."""
_MAX_DEPTH = 16
"""How far references and alternatives of a schema are followed."""


def to_json(value: object) -> str:
    """A value as JSON text that can be encoded: halves of surrogate pairs are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if not _SURROGATE.search(text) else json.dumps(value)


def without_surrogates(text: str) -> str:
    """A text that can be encoded: halves of surrogate pairs, which JSON can write alone, are replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def schema_types(schema: object, root: Schema) -> tuple[str, ...]:
    """The JSON types that a schema allows, in its order; empty if it does not say. root: where its references lead to."""
    return _types(schema, root, 0, {})


def _types(schema: object, root: Schema, depth: int, known: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    """See `schema_types`. known: of the schemas that were met, by their Python ids; so each is read once, however many references lead to it."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ()
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = ()  # what a circle adds to itself
    types: list[str] = []
    declared = schema.get("type")
    if isinstance(declared, str):
        types.append(declared)
    elif isinstance(declared, list):
        types += [name for name in declared if isinstance(name, str)]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        types += _types(referenced(reference, root), root, depth + 1, known)
    for union in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            types += _types(choice, root, depth + 1, known)
    if not types:
        values = schema.get("enum")
        for value in values if isinstance(values, list) else [schema["const"]] if "const" in schema else ():
            types.append(_type_of(value))
    if schema.get("nullable") is True:
        types.append("null")
    known[id(schema)] = tuple(dict.fromkeys(types))
    return known[id(schema)]


def properties(schema: Schema) -> Mapping[str, object]:
    """The schemas of an object's members, none if they are no object themselves."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def referenced(reference: str, root: Schema) -> object:
    """What a reference within the same schema (`#/$defs/name`) leads to; None for any other."""
    if not reference.startswith("#"):
        return None
    found: object = root
    for part in reference[1:].split("/")[1:]:
        if not isinstance(found, Mapping):
            return None
        # Escaped as in a URI, or as it stands.
        names = [text.replace("~1", "/").replace("~0", "~") for text in (unquote(part), part)]
        found = next((found[name] for name in names if name in found), None)
    return found


def _type_of(value: object) -> str:
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def coerced(text: str, types: tuple[str, ...]) -> str:
    """A value's text as JSON of the first of the types that it fits; a JSON string if it fits none."""
    bare = text.strip()
    for name in types:
        match name:
            case "integer" | "number":
                if (number := _number(bare, name)) is not None:
                    return number
            case "boolean" if bare.lower() in ("true", "1", "false", "0"):
                return "true" if bare.lower() in ("true", "1") else "false"
            case "null" if bare in ("null", "None"):
                return "null"
            case "object" | "array" if bare[:1] == ("{" if name == "object" else "[") and is_json(bare):
                return bare
            case _:
                pass
    return to_json(text)


def _number(text: str, name: str) -> str | None:
    if len(text) > _MAX_DIGITS:
        return None
    if _INTEGER.fullmatch(text):
        return str(int(text))
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    if value in (float("inf"), float("-inf")):
        return None
    if value.is_integer() and (name == "integer" or "." not in text):
        return str(int(value))
    return None if name == "integer" else to_json(value)


def is_json(text: str) -> bool:
    """Whether a text is JSON, as the standard has it."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(name)


class ArgumentsWriter:
    """Writes the JSON object of a call's arguments, parameter by parameter. Each method returns the text to add. schema: that of the object."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._is_empty = True
        self._key = ""
        self._has_key = False
        self._types: tuple[str, ...] = ()
        self._value_type: ValueType = "schema"
        self._in_value = False
        self._streams = False
        self._trims = False
        self._begun = False
        self._newline = ""
        self._held: list[str] = []

    def key(self, name: str) -> None:
        self._key = name.strip()
        self._has_key = True

    def begin_value(self, value_type: ValueType, trim_newline: bool) -> str:
        self._types = schema_types(properties(self._schema).get(self._key), self._schema)
        self._value_type = value_type
        # Streamed is what is a string for certain: other types may be several, of which a string is the last resort.
        self._streams = value_type == "string" or (value_type == "schema" and set(self._types) <= {"string"})
        self._in_value = True
        self._has_key = False
        self._trims = trim_newline
        self._begun = False
        self._newline = ""
        return self._next_key(to_json(self._key)) + ": " + ('"' if self._streams else "")

    def value(self, text: str) -> str:
        if self._trims and text:
            if not self._begun and text[0] == "\n":
                text = text[1:]
                self._begun = True
            self._begun = True
            if text:
                text = self._newline + text
                self._newline = "\n" if text[-1] == "\n" else ""
                text = text[: len(text) - len(self._newline)]
        if self._streams:
            return to_json(text)[1:-1]
        self._held.append(text)
        return ""

    def end_value(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        self._in_value = False
        self._newline = ""
        if self._streams:
            return '"'
        if self._value_type == "json" and is_json(text.strip()):
            return text.strip()
        return coerced(text, self._types)

    def close(self) -> str:
        text = self.end_value() if self._in_value else ""
        return text + ("{}" if self._is_empty else "}")

    def cut(self, key: str) -> str:
        """The output ends within the object: what was held back, as it is. key: the part of a parameter's name."""
        if self._in_value:
            return (to_json(self._newline)[1:-1]) if self._streams else "".join([*self._held, self._newline])
        if key or self._has_key:
            return self._next_key(to_json(self._key if self._has_key else key.strip())[: None if self._has_key else -1])
        return ""

    def _next_key(self, key: str) -> str:
        comma = "{" if self._is_empty else ", "
        self._is_empty = False
        return comma + key
