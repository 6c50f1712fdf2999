"""A JSON schema as llguidance takes it.

Owns what differs between JSON Schema and the library: unknown formats are annotations, whitespace is bounded, options of the request are checked, and
keywords that the library lacks are written with others, so that the schema allows the same as before: `not`, `if`, `oneOf` and the `dependent...`
keywords become `anyOf`, where what they forbid can be written as a schema. What cannot be written so stays as it is, and the library refuses it by
its name; `source.explain` says where.
"""

import math
import re
from collections.abc import Iterator, Sequence

import msgspec

from headrace.errors import RequestError
from headrace.grammar.closed_objects import close_objects
from headrace.grammar.schema_logic import SchemaLogic
from headrace.grammar.schema_patterns import ESCAPES, UNWRITABLE, library_pattern
from headrace.grammar.schema_walk import CONSTRAINTS, Json, canonical, listed, reference_names, subschemas, target

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


_MAX_VARIANTS = 64
"""Of one schema: the library multiplies the options of every `anyOf` in it."""

_MAX_OPTIONS = 300
"""Of a `oneOf`: they are compared in pairs."""

_MAX_OVERLAPPING = 8

_OLD_DRAFT = re.compile(r"json-schema\.org/draft-0([3467])/")

_TYPE_LIMITS = (2.0**63, 2.0**64, 2.0**96, 3.4028234663852886e38, 1.7976931348623157e308)
"""The largest int64, uint64, .NET decimal, float32 and float64, as floats; what is as near as others print them is meant, too."""

_MAX_COUNT = 2**31 - 1
"""No string has so many characters, and no list so many items: as an upper bound it says nothing."""

_REWRITTEN = ("oneOf", "not", "if", "dependencies", "dependentRequired", "dependentSchemas")
"""In this order."""


def library_schema(schema: Json, field: str, closes_objects: bool = False) -> dict[str, Json]:
    """The schema as the library takes it, with its options. `schema` is decoded JSON; it is changed.

    closes_objects: as schemas are meant that a client sends: see `_require_discriminators`, and `closed_objects`, though `open_objects` in the
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
    _read_as_its_draft(schema)
    if closes_objects:
        _require_discriminators(schema)
    if closes_objects and not options.get("open_objects"):
        schema = close_objects(schema, options.get("coerce_one_of") is True)
    options.pop("open_objects", None)
    _check_num_properties(schema, field)
    _check_values(schema, field)
    _rewrite(schema)
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
        types = part.get("type", "object")
        if not isinstance(least, int | float) or "object" not in (types if isinstance(types, list) else [types]):
            continue
        is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
        required = required if isinstance(required, list) else [required]
        num_listed = len({name for name in required if isinstance(name, str)})
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


def _rewrite(schema: dict[str, Json]) -> None:
    found = [part for _, part in subschemas(schema)]
    # What a reference goes through stays where it is.
    kept = {keyword for part in found for keyword in str(part.get("$ref", "")).split("/")} & {
        *_REWRITTEN,
        "then",
        "else",
    }
    # Within a schema with an `$id` of its own (`id` in draft 4), `#` means that schema and not the document.
    own_ids = any(isinstance(part.get(name), str) for part in found[1:] for name in ("$id", "id"))
    logic = SchemaLogic(schema, follow=not own_ids)
    # What a rewritten keyword leaves is visited too, but only once: a new schema is new to the walk.
    for _, part in subschemas(schema):
        _drop_idle(part)
        variants = 1
        for keyword in _REWRITTEN:
            if keyword not in part or keyword in kept or (made := _written(part, keyword, logic)) is None:
                continue
            if keyword != "oneOf":  # which was as many alternatives before
                variants *= _variants(made)
                if variants > _MAX_VARIANTS:
                    break
            _replace(part, keyword, made)


def _read_as_its_draft(schema: dict[str, Json]) -> None:
    """Leave out what says nothing in draft 3, 4, 6 or 7, if the schema names one, in place: what is beside a `$ref`, and keywords that came later."""
    if not (found := _OLD_DRAFT.search(str(schema.get("$schema", "")))):
        return
    later = {"dependentRequired", "dependentSchemas"} | ({"if", "then", "else"} if int(found[1]) < 7 else set())
    for part in [part for _, part in subschemas(schema)]:
        beside = CONSTRAINTS - {"$ref"} if isinstance(part.get("$ref"), str) else frozenset()
        for keyword in (later | beside) & part.keys():
            del part[keyword]


def _require_discriminators(schema: dict[str, Json]) -> None:
    """Require the property that an OpenAPI `discriminator` names in each option that has a value of its own for it, in place.

    Whoever reads a value chooses the option by that property; pydantic leaves it optional in a schema where a model has a default for it.
    """
    for part in [part for _, part in subschemas(schema)]:
        given = part.get("discriminator")
        name = given.get("propertyName") if isinstance(given, dict) else None
        for option in [*listed(part.get("oneOf")), *listed(part.get("anyOf"))] if isinstance(name, str) else ():
            if isinstance(option, dict) and isinstance(option.get("$ref"), str):
                option = target(schema, option["$ref"])
            properties = option.get("properties") if isinstance(option, dict) else None
            tag = properties.get(name) if isinstance(properties, dict) else None
            required = option.get("required", []) if tag is not None else None
            if isinstance(tag, dict) and ("const" in tag or "enum" in tag) and isinstance(required, list):
                option["required"] = required if name in required else [*required, name]


def _drop_idle(schema: dict[str, Json]) -> None:
    """Leave out keywords that say nothing, and write whole numbers as the library reads them."""
    for keyword in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        value = schema.get(keyword)
        if isinstance(value, float) and value.is_integer():
            schema[keyword] = int(value)
    for keyword in ("maxLength", "maxItems", "maxProperties"):
        value = schema.get(keyword)
        if isinstance(value, int | float) and value >= _MAX_COUNT:
            del schema[keyword]
    _drop_type_limits(schema)
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (schema.get("uniqueItems") is True and isinstance(most, int) and most < 2):
        del schema["uniqueItems"]
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif "then" not in schema and "else" not in schema:
        del schema["if"]
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    if schema.get("unevaluatedProperties") in (True, {}):
        del schema["unevaluatedProperties"]
    names = schema.get("propertyNames")
    if names is True or names == {} or names == {"type": "string"}:
        del schema["propertyNames"]
    required = schema.get("required")
    least = schema.get("minProperties")
    if isinstance(least, int) and isinstance(required, list) and least <= len({str(name) for name in required}):
        del schema["minProperties"]


def _drop_type_limits(schema: dict[str, Json]) -> None:
    """Leave out bounds that say only what type the number has where it is read; the library cannot hold most of them. It holds those of int32, and
    of integers the largest int64."""
    types = schema.get("type")
    is_integer = types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)
    for keyword, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        value = schema.get(keyword)
        if not isinstance(value, int | float) or not 0 < sign * value <= _TYPE_LIMITS[-1]:
            continue
        if not any(math.isclose(sign * value, limit, rel_tol=1e-6) for limit in _TYPE_LIMITS):
            continue
        if is_integer and (keyword, value) in (("maximum", 2**63 - 1), ("exclusiveMaximum", 2**63)):
            continue
        del schema[keyword]
        exclusive = f"exclusive{keyword.capitalize()}"
        if isinstance(schema.get(exclusive), bool):  # as draft 4 has it
            del schema[exclusive]


def _replace(schema: dict[str, Json], keyword: str, made: list[Json]) -> None:
    """Let a schema hold these instead of a keyword. The order of properties stays: in the keyword's place, or after all else."""
    if keyword == "oneOf" and "anyOf" not in schema and len(made) == 1 and isinstance(made[0], dict):
        items = [("anyOf", made[0]["anyOf"]) if name == keyword else (name, value) for name, value in schema.items()]
        schema.clear()
        schema.update(items)
        return
    for name in ("if", "then", "else") if keyword == "if" else (keyword,):
        schema.pop(name, None)
    if "allOf" not in schema:
        schema["allOf"] = made
    elif "anyOf" not in schema:
        schema["anyOf"] = [{"allOf": made}]
    else:
        schema["allOf"] = [*schema["allOf"], *made]


def _variants(made: Sequence[Json]) -> int:
    """How many alternatives the library makes of these together."""
    product = 1
    for part in made:
        if isinstance(part, dict):
            if "anyOf" in part:
                product *= sum(_variants([option]) for option in part["anyOf"])
            product *= _variants(part.get("allOf", ()))
        if product > _MAX_VARIANTS:
            break
    return product


def _written(schema: dict[str, Json], keyword: str, logic: SchemaLogic) -> list[Json] | None:
    """Schemas that together say what a keyword says; None where none are known."""
    match keyword:
        case "oneOf":
            return _one_of(schema, logic)
        case "not":
            made = logic.complement(schema["not"])
            return None if made is None else [made]
        case "if":
            return _if(schema, logic)
        case _:
            return _dependent(schema, keyword)


def _if(schema: dict[str, Json], logic: SchemaLogic) -> list[Json] | None:
    condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
    wrong = logic.complement(condition)
    if wrong is None:
        # Without `then` the condition is as good as `else`.
        return [{"anyOf": [condition, otherwise]}] if then is True else None
    return [{"anyOf": [{"allOf": [condition, then]}, {"allOf": [wrong, otherwise]}]}]


def _one_of(schema: dict[str, Json], logic: SchemaLogic) -> list[Json] | None:
    """`anyOf`, each option without what another one allows too."""
    options = schema["oneOf"]
    if not isinstance(options, list) or not 1 < len(options) <= _MAX_OPTIONS:
        return None
    context = logic.parts({key: value for key, value in schema.items() if key != "oneOf"})
    overlapping: list[list[Json]] = [[] for _ in options]
    for i, one in enumerate(options):
        for j in range(i + 1, len(options)):
            if not logic.exclude(one, options[j], context):
                overlapping[i].append(options[j])
                overlapping[j].append(one)
    if not any(overlapping):
        return [{"anyOf": options}]
    if len(options) > _MAX_OVERLAPPING:
        return None
    made: list[Json] = []
    for option, others in zip(options, overlapping, strict=True):
        without = [logic.complement(other) for other in others]
        if None in without:
            return None
        if False not in without:
            made.append({"allOf": [option, *without]} if without else option)
    if _variants([{"anyOf": made}]) > _MAX_VARIANTS:
        return None
    return [{"anyOf": made}] if made else [False]


def _dependent(schema: dict[str, Json], keyword: str) -> list[Json] | None:
    """For each name: it is absent, or it is there and so is what depends on it."""
    by_name = schema[keyword]
    if not isinstance(by_name, dict):
        return None
    made: list[Json] = []
    for name, wanted in by_name.items():
        then = {"required": [name, *wanted]} if isinstance(wanted, list) else {"allOf": [{"required": [name]}, wanted]}
        # What is no object has no properties, and is in the first option alone.
        made.append({"anyOf": [{"properties": {name: False}}, {"type": "object", **then}]})
    return made
