"""Walking JSON schemas: decoding within a depth, every schema in a document with its place, and what local references point at.

All walks are iterative and linear: a schema comes from a client.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from urllib.parse import quote, unquote

import msgspec

from headrace.errors import RequestError

Json = Any
"""A decoded JSON value."""

MAX_DEPTH = 100
"""Levels of arrays and objects in a schema. The library's own limit is 128 for the whole text."""

# Keywords by what they hold. A keyword that may hold a schema or a list of schemas (`items`) is in both.
ONE_SCHEMA = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
SCHEMA_LIST = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
SCHEMA_BY_NAME = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
_OTHER_CONSTRAINTS = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "$ref",
        "const",
        "dependentRequired",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "required",
        "type",
        "uniqueItems",
    }
)
CONSTRAINTS = (ONE_SCHEMA | SCHEMA_LIST | SCHEMA_BY_NAME | _OTHER_CONSTRAINTS) - {
    "$defs",
    "contentSchema",
    "definitions",
}
"""The keywords that can make a value invalid. Any other is an annotation."""

_SAFE = "~!$&'()*+,;=:@?"
"""What stands for itself in the fragment of a URI (RFC 3986), beside letters and digits."""

_LITERAL = frozenset({"const", "default", "enum", "examples"})

# Brackets and whole strings, in which brackets do not count.
_STRUCTURE = re.compile(r'[\[\]{}]|"(?:\\.|[^"\\])*"', re.DOTALL)

_MAX_JOINED = 8
"""Parts of a `$ref` that may be one name, whose slashes were not escaped."""

_Place = Literal["schema", "list", "names", "literal", "unknown"]


def decode_json(text: str, field: str, what: str = "the schema") -> Json:
    """A JSON value at most `MAX_DEPTH` levels deep. Raises RequestError for anything else."""
    depth = _depth(text)
    if depth > MAX_DEPTH:
        raise RequestError(f"{what} is nested {depth} levels deep; at most {MAX_DEPTH} are supported", field)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as err:
        raise RequestError(f"{what} is not valid JSON: {err}", field) from None


def _depth(text: str) -> int:
    """The deepest nesting of brackets outside strings; for text that is not JSON some number."""
    depth = deepest = 0
    for char in _STRUCTURE.findall(text):
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def json_end(text: str, start: int) -> int:
    """Where the JSON value that begins at `start` ends: behind the bracket that closes it, or at the end of the text."""
    depth = 0
    for found in _STRUCTURE.finditer(text, start):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth <= 0:
            return found.end()
    return len(text)


def listed(value: Json) -> list[Json]:
    """A list as it is; none for any other value."""
    return value if isinstance(value, list) else []


def subschemas(root: Json) -> Iterator[tuple[str, dict[str, Json]]]:
    """Every schema in `root` that is an object, with its place (`#/properties/a`), in the order of the text; `root` itself first.

    Only what keywords and local references (`$ref: "#/..."`) make a schema: not what is inside `const`, `enum`, `default` or `examples`. A schema may
    be changed once it was given, but for the keywords that hold schemas. Time is linear in the size of `root`.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Json]] = [("#", root)]
    while waiting:
        place, schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield place, schema
        found = list(children(place, schema))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            found.append((reference, target(root, reference)))
        waiting += reversed(found)


def children(place: str, schema: dict[str, Json]) -> Iterator[tuple[str, Json]]:
    """The schemas that a schema has in its keywords, each with its place."""
    for keyword, value in schema.items():
        at = f"{place}/{_escape(keyword)}"
        if isinstance(value, list):
            if keyword in SCHEMA_LIST:
                yield from ((f"{at}/{i}", item) for i, item in enumerate(value))
        elif isinstance(value, dict):
            if keyword in SCHEMA_BY_NAME:
                yield from ((f"{at}/{_escape(name)}", item) for name, item in value.items())
            elif keyword in ONE_SCHEMA:
                yield at, value


def target(root: Json, reference: str) -> Json:
    """What a local reference (`#`, `#/$defs/a`) points at; None where there is nothing, for a literal value, and for other references."""
    found = _found(root, reference)
    return None if found is None else found[1]


def canonical(root: Json, reference: str) -> str:
    """A local reference as RFC 6901 writes it, whose names were written as they stand (`#/$defs/Animal<Dog>`); any other as it is."""
    found = _found(root, reference)
    return reference if found is None else pointer(found[0])


def reference_names(root: Json, reference: Json) -> list[str]:
    """The names of the members on the way to what a local reference points at; none for any other value."""
    found = _found(root, reference) if isinstance(reference, str) else None
    return [] if found is None else found[0]


def pointer(names: Sequence[str]) -> str:
    """The reference to a place. names: of the members on the way, or their places in lists."""
    return "#" + "".join(f"/{quote(_escape(name), safe=_SAFE)}" for name in names)


def _found(root: Json, reference: str) -> tuple[list[str], Json] | None:
    """The names on the way to what a local reference points at, and what is there."""
    if reference == "#":
        return [], root
    if not reference.startswith("#/"):
        return None
    value = root
    kind: _Place = "schema"
    names: list[str] = []
    parts = reference[2:].split("/")
    at = 0
    while at < len(parts):
        name, num_parts = _member(value, parts[at : at + _MAX_JOINED])
        if not num_parts:
            return None
        at += num_parts
        inner = value[int(name)] if isinstance(value, list) else value[name]
        kind = "schema" if kind == "list" else _kind(kind, name, inner)
        value = inner
        names.append(name)
        if kind == "literal":
            return None
    return names, value


def _member(value: Json, parts: Sequence[str]) -> tuple[str, int]:
    """The member that the first parts of a `$ref` name, and how many parts; 0 for none. Escaped as they should be, else as they stand."""
    if isinstance(value, list):
        is_place = parts[0].isdecimal() and int(parts[0]) < len(value)
        return parts[0], int(is_place)
    if isinstance(value, dict):
        for num_parts in range(1, len(parts) + 1):
            text = "/".join(parts[:num_parts])
            for name in (_unescape(unquote(text)), _unescape(text), text):  # in a URI: RFC 6901, section 6
                if name in value:
                    return name, num_parts
    return "", 0


def _kind(kind: _Place, name: str, value: Json) -> _Place:
    """What the value of `name` is, inside something of `kind`."""
    if kind == "names":
        return "schema"
    if kind != "schema":
        return "unknown"
    if name in _LITERAL:
        return "literal"
    if name in SCHEMA_BY_NAME:
        return "names"
    if name in SCHEMA_LIST and isinstance(value, list):
        return "list"
    return "schema" if name in ONE_SCHEMA else "unknown"


def _escape(name: str) -> str:
    """A name as part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _unescape(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


# --- the options that a schema has in `x-guidance`, as a route of the server adds to them


def with_options(schema: Json, options: dict[str, Json]) -> Json:
    """The schema with these options, unless it has its own; what is no schema with options as it is."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict) or not isinstance(own := schema.get("x-guidance", {}), dict):
        return schema
    return {**schema, "x-guidance": options | own}


def with_one_of_as_any_of(schema: Json) -> Json:
    """A schema, or its JSON, whose `oneOf` is taken as `anyOf` where its options cannot be shown to exclude each other, unless it says otherwise.

    What is no JSON is given back, to be refused where it is read.
    """
    if isinstance(schema, str):
        if "oneOf" not in schema:
            return schema
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return schema
    if not any("oneOf" in part for _, part in subschemas(schema)):
        return schema
    return with_options(schema, {"coerce_one_of": True})
