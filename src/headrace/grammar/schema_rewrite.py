"""Keywords that the library does not have, written with those that it has. The schema allows the same as before.

`not`, `if`, `oneOf` and the `dependent...` keywords become `anyOf`, where what they forbid can be written as a schema. What cannot be written so
stays as it is, and the library refuses it by its name.
"""

import math
import re
from collections.abc import Callable, Sequence

from headrace.grammar.schema_logic import SchemaLogic
from headrace.grammar.schema_walk import CONSTRAINTS, Json, subschemas, target

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

_REWRITTEN = frozenset({"if", "then", "else", "not", "oneOf", "dependencies", "dependentRequired", "dependentSchemas"})


def rewrite(schema: dict[str, Json]) -> None:
    """Rewrite a schema and all in it, in place."""
    found = [part for _, part in subschemas(schema)]
    # What a reference goes through stays where it is.
    kept = {keyword for part in found for keyword in str(part.get("$ref", "")).split("/") if keyword in _REWRITTEN}
    # Within a schema with an `$id` of its own (`id` in draft 4), `#` means that schema and not the document.
    own_ids = any(isinstance(part.get(name), str) for part in found[1:] for name in ("$id", "id"))
    logic = SchemaLogic(schema, follow=not own_ids)
    # What a rewritten keyword leaves is visited too, but only once: a new schema is new to the walk.
    for _, part in subschemas(schema):
        _drop_idle(part)
        variants = 1
        for keyword, make in _MAKERS:
            if keyword not in part or keyword in kept:
                continue
            made = make(part, logic)
            if made is None:
                continue
            if keyword != "oneOf":  # which was as many alternatives before
                variants *= _variants(made)
                if variants > _MAX_VARIANTS:
                    break
            _replace(part, keyword, made)


def read_as_its_draft(schema: dict[str, Json]) -> None:
    """Leave out what says nothing in the draft that the schema names, in place. For before `rewrite`."""
    if draft := _OLD_DRAFT.search(str(schema.get("$schema", ""))):
        for part in [part for _, part in subschemas(schema)]:
            _read_as_draft(part, int(draft[1]))


def require_discriminators(schema: dict[str, Json]) -> None:
    """Require the property that an OpenAPI `discriminator` names in each option that has a value of its own for it, in place.

    Whoever reads a value chooses the option by that property; pydantic leaves it optional in a schema where a model has a default for it.
    """
    for part in [part for _, part in subschemas(schema)]:
        given = part.get("discriminator")
        name = given.get("propertyName") if isinstance(given, dict) else None
        for option in [*_listed(part.get("oneOf")), *_listed(part.get("anyOf"))] if isinstance(name, str) else ():
            if isinstance(option, dict) and isinstance(option.get("$ref"), str):
                option = target(schema, option["$ref"])
            properties = option.get("properties") if isinstance(option, dict) else None
            tag = properties.get(name) if isinstance(properties, dict) else None
            required = option.get("required", []) if tag is not None else None
            if isinstance(tag, dict) and ("const" in tag or "enum" in tag) and isinstance(required, list):
                option["required"] = required if name in required else [*required, name]


def _listed(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _read_as_draft(schema: dict[str, Json], draft: int) -> None:
    """Leave out what says nothing in draft 3, 4, 6 or 7: what is beside a `$ref`, and keywords that came later."""
    later = {"dependentRequired", "dependentSchemas"} | ({"if", "then", "else"} if draft < 7 else set())
    beside = CONSTRAINTS - {"$ref"} if isinstance(schema.get("$ref"), str) else frozenset()
    for keyword in (later | beside) & schema.keys():
        del schema[keyword]


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


def _not(schema: dict[str, Json], logic: SchemaLogic) -> list[Json] | None:
    made = logic.complement(schema["not"])
    return None if made is None else [made]


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


def _dependent_required(keyword: str) -> Callable[[dict[str, Json], SchemaLogic], list[Json] | None]:
    def make(schema: dict[str, Json], logic: SchemaLogic) -> list[Json] | None:
        """For each name: it is absent, or it is there and so is what depends on it."""
        made: list[Json] = []
        by_name = schema[keyword]
        if not isinstance(by_name, dict):
            return None
        for name, wanted in by_name.items():
            then = (
                {"required": [name, *wanted]} if isinstance(wanted, list) else {"allOf": [{"required": [name]}, wanted]}
            )
            # What is no object has no properties, and is in the first option alone.
            made.append({"anyOf": [{"properties": {name: False}}, {"type": "object", **then}]})
        return made

    return make


_MAKERS: tuple[tuple[str, Callable[[dict[str, Json], SchemaLogic], list[Json] | None]], ...] = (
    ("oneOf", _one_of),
    ("not", _not),
    ("if", _if),
    ("dependencies", _dependent_required("dependencies")),
    ("dependentRequired", _dependent_required("dependentRequired")),
    ("dependentSchemas", _dependent_required("dependentSchemas")),
)
