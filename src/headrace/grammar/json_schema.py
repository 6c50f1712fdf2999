"""A JSON schema as llguidance takes it.

Owns what differs between JSON Schema and the library: unknown formats are annotations, whitespace is bounded, options of the request are checked, and
keywords that the library lacks are written with others (`schema_rewrite`). What the library refuses in the end is explained in `refusals`.
"""

import re

import msgspec

from headrace.errors import RequestError
from headrace.grammar.schema_rewrite import rewrite
from headrace.grammar.schema_walk import Json, subschemas

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""The formats that strings are held to. Any other is an annotation, as JSON Schema says."""

WHITESPACE = r" |\n(?: {0,40}|\t{0,12})"
"""What may stand between two tokens of JSON, once: a space, or a line break and an indent. So `json.dumps` prints it, with any indent down to ten
levels of four spaces, and a model cannot go on with whitespace for ever."""

_OPTIONS: dict[str, type] = {
    "item_separator": str,
    "key_separator": str,
    "whitespace_flexible": bool,
    "whitespace_pattern": str,
    "coerce_one_of": bool,
    "json_allowed_escapes": str,
    "json_allow_general_unicode_escapes": bool,
}


def library_schema(schema: Json, field: str) -> dict[str, Json]:
    """The schema as the library takes it, with its options. `schema` is decoded JSON; it is changed.

    Raises RequestError for what is no schema, for one that allows nothing, and for options that are not allowed.
    """
    if schema is True:
        schema = {}
    if schema is False:
        raise RequestError("the schema is `false`, which allows nothing", field)
    if not isinstance(schema, dict):
        raise RequestError(
            f"a schema must be an object or a boolean, got {msgspec.json.encode(schema)[:80].decode()}", field
        )
    options = _options(schema.pop("x-guidance", {}), field)
    for _, part in subschemas(schema):
        name = part.get("format")
        if isinstance(name, str) and name not in FORMATS:
            del part["format"]
    rewrite(schema)
    for _, part in subschemas(schema):
        if isinstance(part.get("pattern"), str):
            part["pattern"] = library_pattern(part["pattern"])
    # Last, because the library takes the options out and puts the last keyword where they were.
    return {**schema, "x-guidance": options}


_NEGATED_CLASS = re.compile(r"(?P<escape>\\.)|\[\^(?!\])(?P<hyphen>-?)", re.DOTALL)


def library_pattern(pattern: str) -> str:
    """A `pattern` as the library takes it: no `[^...]` in it matches U+0001.

    The library allows an escaped quote and an escaped backslash wherever a class has all control characters, even if the class excludes
    them. A class without one control character is read exactly.
    """
    return _NEGATED_CLASS.sub(lambda found: found["escape"] or r"[^\x{1}" + (r"\-" if found["hyphen"] else ""), pattern)


def _options(own: Json, field: str) -> dict[str, Json]:
    """The library's options: the schema's own, and bounded whitespace where it says nothing about whitespace."""
    if not isinstance(own, dict):
        raise RequestError("`x-guidance` must be an object", field)
    if own.get("lenient", False) is not False:
        raise RequestError(
            "`lenient` in `x-guidance` is not supported: it would ignore keywords of the schema; remove those keywords instead",
            field,
        )
    own.pop("lenient", None)
    for name, value in own.items():
        if name not in _OPTIONS:
            raise RequestError(f"unknown option {name!r} in `x-guidance`; known: {', '.join(_OPTIONS)}", field)
        if not isinstance(value, _OPTIONS[name]):
            raise RequestError(
                f"{name!r} in `x-guidance` must be a {'boolean' if _OPTIONS[name] is bool else 'string'}", field
            )
    if "whitespace_flexible" in own or "whitespace_pattern" in own:
        return own
    return {**own, "whitespace_pattern": WHITESPACE}
