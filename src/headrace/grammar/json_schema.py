"""A JSON schema as llguidance takes it.

Owns what differs between JSON Schema and the library: unknown formats are annotations, whitespace is bounded, options of the request are checked, and
keywords that the library lacks are written with others (`schema_rewrite`). What the library refuses in the end is explained in `refusals`.
"""

import re
from collections.abc import Iterator

import msgspec

from headrace.errors import RequestError
from headrace.grammar.closed_objects import close_objects
from headrace.grammar.schema_patterns import ESCAPES, UNWRITABLE, library_pattern
from headrace.grammar.schema_rewrite import read_as_its_draft, require_discriminators, rewrite
from headrace.grammar.schema_walk import CONSTRAINTS, Json, canonical, reference_names, subschemas

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""The formats that strings are held to. Any other is an annotation, as JSON Schema says."""

WHITESPACE = r" |\n(?: {0,40}|\t{0,12})"
"""What may stand between two tokens of JSON, once: a space, or a line break and an indent. So `json.dumps` prints it, with any indent down to ten
levels of four spaces, and a model cannot go on with whitespace for ever."""

_IDENTIFIERS = frozenset(
    {"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions"}
)

_OPTIONS: dict[str, type] = {
    "item_separator": str,
    "key_separator": str,
    "whitespace_flexible": bool,
    "whitespace_pattern": str,
    "coerce_one_of": bool,
    "open_objects": bool,
}


def library_schema(schema: Json, field: str, closes_objects: bool = False) -> dict[str, Json]:
    """The schema as the library takes it, with its options. `schema` is decoded JSON; it is changed.

    closes_objects: as schemas are meant that a client sends: see `require_discriminators`, and `closed_objects`, though `open_objects` in the
    schema's options leaves objects open.
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
        if isinstance(part.get("$ref"), str):
            part["$ref"] = canonical(schema, part["$ref"])
    read_as_its_draft(schema)
    if closes_objects:
        require_discriminators(schema)
    if closes_objects and not options.get("open_objects"):
        schema = close_objects(schema, options.get("coerce_one_of") is True)
    options.pop("open_objects", None)
    _check_num_properties(schema, field)
    _check_values(schema, field)
    rewrite(schema)
    for _, part in subschemas(schema):
        if isinstance(part.get("pattern"), str):
            part["pattern"] = library_pattern(part["pattern"])
        by_pattern = part.get("patternProperties")
        if isinstance(by_pattern, dict):
            part["patternProperties"] = {library_pattern(pattern): value for pattern, value in by_pattern.items()}
    _drop_annotations(schema)
    # Last, because the library takes the options out and puts the last keyword where they were.
    return {**schema, "x-guidance": options}


def _drop_annotations(schema: dict[str, Json]) -> None:
    """Leave out what says nothing of values, in place: beside a `$ref`, the library takes a keyword that it does not know for one that does."""
    parts = [part for _, part in subschemas(schema)]
    on_the_way = {name for part in parts for name in reference_names(schema, part.get("$ref"))}
    for part in parts:
        for keyword in part.keys() - CONSTRAINTS - _IDENTIFIERS - on_the_way:
            del part[keyword]


def _check_num_properties(schema: dict[str, Json], field: str) -> None:
    """Raises RequestError where `minProperties` could be satisfied by a name that is there twice: JSON counts it once.

    The library keeps apart the names that a schema lists and those that it does not, but not two of the latter.
    """
    for place, part in subschemas(schema):
        least, required = part.get("minProperties"), part.get("required")
        if not isinstance(least, int | float) or "object" not in _listed(part.get("type", "object")):
            continue
        is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
        num_listed = len({name for name in _listed(required) if isinstance(name, str)})
        if least > num_listed + 1 and not is_closed:
            raise RequestError(
                "`minProperties` is supported only up to one more than the properties in `required`, because further names could repeat"
                f" (at {place}/minProperties)",
                field,
            )


def _check_values(schema: dict[str, Json], field: str) -> None:
    """Raises RequestError for values of `const` and `enum` that cannot be written.

    The library would leave control characters out, and would write another integer that a float can hold.
    """
    for place, part in subschemas(schema):
        for keyword in ("const", "enum"):
            values = list(_scalars(part.get(keyword)))
            wrong = next((value for value in values if not _is_written_exactly(value)), None)
            if wrong is not None:
                raise RequestError(
                    f"the number {wrong} in `{keyword}` is not supported: it has more digits than a float of 64 bits holds, "
                    f"or is beyond integers of 64 bits; write it as a string (at {place}/{keyword})",
                    field,
                )
            if any(isinstance(value, str) and re.search(UNWRITABLE, value) for value in values):
                raise RequestError(
                    f"control characters in `{keyword}` are not supported, except \\n, \\r, \\t, \\b and \\f (at {place}/{keyword})",
                    field,
                )


def _is_written_exactly(value: Json) -> bool:
    """Whether the library, which counts in floats, writes a literal as it stands. It does not survive the smallest integer of 64 bits."""
    if isinstance(value, float):
        return value != -(2.0**63)
    return not isinstance(value, int) or value == 2**63 - 1 or (abs(value) < 2**63 and int(float(value)) == value)


def _scalars(value: Json) -> Iterator[Json]:
    """What a value has that is no list and no object; names are written as they are."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list | dict):
            waiting += value if isinstance(value, list) else value.values()
        else:
            yield value


def _listed(value: Json) -> list[Json]:
    return value if isinstance(value, list) else [value]


def _options(own: Json, field: str) -> dict[str, Json]:
    """The library's options, and `open_objects`, which is ours: the schema's own, and bounded whitespace where it says nothing about whitespace."""
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
    if "whitespace_flexible" not in own and "whitespace_pattern" not in own:
        own["whitespace_pattern"] = WHITESPACE
    return {**own, "json_allowed_escapes": ESCAPES}
