"""What can be shown of JSON schemas: that two exclude each other, and which schema allows exactly what another forbids.

Both are incomplete: what cannot be shown is False or None, and then the keyword that needed it is refused. Nothing here is ever guessed. Local
references are followed; the work on one schema is bounded.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence

from headrace.grammar.schema_patterns import is_valid_string
from headrace.grammar.schema_walk import CONSTRAINTS, Json, listed, target

TYPES = ("null", "boolean", "number", "string", "array", "object")

_MAX_DEPTH = 8
_MAX_STEPS = 100_000
_VALUE_STEPS = 100
"""What it counts to try one value."""
_MAX_CHARACTERS = 1_000
"""Of the strings of an `enum` whose complement is written as a regular expression."""

_MAX_EXACT = 2**53
"""The library reads numbers as float64."""

Parts = Sequence[dict[str, Json]]
"""Schemas that hold together, each without `allOf` and `$ref` being looked at."""


class SchemaLogic:
    """Answers for one document. root: what local references point into, if `follow`."""

    def __init__(self, root: Json, follow: bool) -> None:
        self._root = root
        self._follow = follow
        self._steps = 0

    # --- exclusion

    def exclude(self, one: Json, other: Json, context: Parts = ()) -> bool:
        """Whether it is shown that no value is valid for both, given that it is valid for `context`."""
        if one is False or other is False:
            return True
        return self._exclude([*context, *self.parts(one)], [*context, *self.parts(other)], 0)

    def parts(self, schema: Json, depth: int = 0) -> list[dict[str, Json]]:
        """A schema, and what its `$ref` and `allOf` say, as parts that hold together."""
        self._steps += 1
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            return []
        reference = schema.get("$ref")
        referenced = self.parts(self._target(reference), depth + 1)
        found = [schema, *referenced]
        for part in listed(schema.get("allOf")):
            found += self.parts(part, depth + 1)
        return found

    def _target(self, reference: Json) -> Json:
        """What a reference points at; None where that is not known."""
        return target(self._root, reference) if self._follow and isinstance(reference, str) else None

    def _exclude(self, ours: Parts, theirs: Parts, depth: int) -> bool:
        self._steps += 1
        if depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            return False
        if any(self._options_exclude(part, theirs, depth) for part in ours):
            return True
        if any(self._options_exclude(part, ours, depth) for part in theirs):
            return True
        both = [*ours, *theirs]
        common = _types(both)
        values = _values(both)
        if values is not None:
            return all(_type_of(value) not in common or self._is_invalid(value, both) for value in values)
        return all(self._exclude_type(kind, ours, theirs, depth) for kind in common)

    def _is_invalid(self, value: Json, parts: Parts) -> bool:
        """Whether it is shown that a value of a type that the parts allow is not valid for one of them."""
        self._steps += _VALUE_STEPS
        if self._steps > _MAX_STEPS:
            return False
        if isinstance(value, str):
            return any(is_valid_string(value, part) is False for part in parts)
        if isinstance(value, list):
            return _is_outside(len(value), parts, ("minItems",), ("maxItems",))
        if isinstance(value, dict):
            return any(name not in value for part in parts for name in listed(part.get("required")))
        if isinstance(value, int | float) and not isinstance(value, bool):
            if value % 1 and any(_allows_only_integers(part) for part in parts):
                return True
            return _is_outside(value, parts, ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
        return False

    def _options_exclude(self, part: dict[str, Json], others: Parts, depth: int) -> bool:
        """Whether a part is an `anyOf` or `oneOf` all of whose options exclude the others."""
        return any(
            all(
                option is False or self._exclude(self.parts(option, depth + 1), others, depth + 1)
                for option in part[keyword]
            )
            for keyword in ("anyOf", "oneOf")
            if listed(part.get(keyword))
        )

    def _exclude_type(self, kind: str, ours: Parts, theirs: Parts, depth: int) -> bool:
        both = [*ours, *theirs]
        if kind == "number":
            return _is_empty(both, ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
        if kind == "string":
            return _is_empty(both, ("minLength",), ("maxLength",))
        if kind == "array":
            return _is_empty(both, ("minItems",), ("maxItems",))
        if kind == "object":
            required = {name for part in both for name in listed(part.get("required")) if isinstance(name, str)}
            return any(self._properties_exclude(name, ours, theirs, depth) for name in required)
        return False

    def _properties_exclude(self, name: str, ours: Parts, theirs: Parts, depth: int) -> bool:
        first, second = list(_property_schemas(name, ours)), list(_property_schemas(name, theirs))
        if False in first or False in second:
            return True
        left = [part for schema in first for part in self.parts(schema, depth + 1)]
        right = [part for schema in second for part in self.parts(schema, depth + 1)]
        return bool(left and right) and self._exclude(left, right, depth + 1)

    # --- complement

    def complement(self, schema: Json, depth: int = 0) -> Json | None:
        """A schema that allows exactly what `schema` forbids; None where none is known."""
        self._steps += 1
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            return None
        options: list[Json] = []
        for keyword, value in schema.items():
            if keyword not in CONSTRAINTS:
                continue
            option = self._complement_of(keyword, value, depth + 1)
            if option is None:
                return None
            if option is not False:
                options.append(option)
        return _any_of(options)

    def _complement_of(self, keyword: str, value: Json, depth: int) -> Json | None:
        match keyword:
            case "type":
                return _other_types(value)
            case "const":
                return _other_values([value])
            case "enum":
                return _other_values(value) if isinstance(value, list) else None
            case "required":
                if not isinstance(value, list):
                    return None
                return (
                    {"type": "object", **_any_of([{"properties": {name: False}} for name in value])} if value else False
                )
            case "properties":
                return self._wrong_property(value, depth)
            case "not":
                return copy.deepcopy(value)
            case "$ref":
                found = self._target(value)
                return None if found is None else self.complement(found, depth)
            case "anyOf" | "allOf":
                found = [self.complement(part, depth) for part in listed(value)]
                if not found or None in found:
                    return None
                return (
                    {"allOf": found} if keyword == "anyOf" else _any_of([part for part in found if part is not False])
                )
        return _beyond(keyword, value)

    def _wrong_property(self, value: Json, depth: int) -> Json | None:
        if not isinstance(value, dict):
            return None
        options = []
        for name, schema in value.items():
            wrong = self.complement(schema, depth)
            if wrong is None:
                return None
            if wrong is not False:
                options.append({"type": "object", "properties": {name: wrong}, "required": [name]})
        return _any_of(options)


def _any_of(options: list[Json]) -> Json:
    """One of the options; False if there is none."""
    if len(options) < 2:
        return options[0] if options else False
    return {"anyOf": options}


def _types(parts: Parts) -> list[str]:
    """The types that all parts allow, `number` for integers too."""
    found = list(TYPES)
    for part in parts:
        own = part.get("type")
        if own is not None:
            names = [
                "number" if name == "integer" else name for name in ([own] if isinstance(own, str) else listed(own))
            ]
            found = [kind for kind in found if kind in names]
    return found


def _type_of(value: Json) -> str:
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _values(parts: Parts) -> list[Json] | None:
    """The values that `const` and `enum` of all parts leave; None where no part has any."""
    found: list[Json] | None = None
    for part in parts:
        for own in ([part["const"]] if "const" in part else None, part.get("enum")):
            if isinstance(own, list):
                keys = {_key(value) for value in own}
                found = own if found is None else [value for value in found if _key(value) in keys]
    return found


def _key(value: Json) -> str:
    """Equal for values that are equal as JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{name!r}:{_key(item)}" for name, item in value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_key, value)) + "]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return repr(value)


def _numbers(parts: Parts, keywords: Iterable[str]) -> Iterator[tuple[float, bool]]:
    """(bound, whether it is excluded itself) of some keywords. A boolean, as draft 4 has it, is left out."""
    for part in parts:
        for keyword in keywords:
            value = part.get(keyword)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value, keyword.startswith("exclusive")


def _is_empty(parts: Parts, lower: Iterable[str], upper: Iterable[str]) -> bool:
    """Whether a lower bound is above an upper one."""
    least = max(_numbers(parts, lower), default=None)
    most = min(((bound, not excluded) for bound, excluded in _numbers(parts, upper)), default=None)
    if least is None or most is None:
        return False
    return least[0] > most[0] or (least[0] == most[0] and (least[1] or not most[1]))


def _is_outside(value: float, parts: Parts, lower: Iterable[str], upper: Iterable[str]) -> bool:
    return any(value < bound or (value == bound and excluded) for bound, excluded in _numbers(parts, lower)) or any(
        value > bound or (value == bound and excluded) for bound, excluded in _numbers(parts, upper)
    )


def _allows_only_integers(part: dict[str, Json]) -> bool:
    types = [part.get("type"), *listed(part.get("type"))]
    return "integer" in types and "number" not in types


def _property_schemas(name: str, parts: Parts) -> Iterator[Json]:
    """What the parts say about a property, as far as that is certain."""
    for part in parts:
        properties = part.get("properties")
        if isinstance(properties, dict) and name in properties:
            yield properties[name]
        elif "additionalProperties" in part and not part.get("patternProperties"):
            yield part["additionalProperties"]


def _other_types(value: Json) -> Json | None:
    names = [value] if isinstance(value, str) else listed(value)
    if "integer" in names and "number" not in names:
        return None  # numbers with a fraction have no name
    others = [kind for kind in TYPES if kind not in names]
    return {"type": others} if others else False


def _other_values(values: list[Json]) -> Json | None:
    """Every value but these. None for arrays and objects, for numbers that are not exact, and where the strings are too long together."""
    kinds = {_type_of(value) for value in values}
    strings = [value for value in values if isinstance(value, str)]
    if kinds & {"array", "object"} or sum(map(len, strings)) > _MAX_CHARACTERS:
        return None
    numbers = sorted({value for value in values if _type_of(value) == "number"})
    if any(abs(number) > _MAX_EXACT for number in numbers):
        return None
    options: list[Json] = [{"type": [kind for kind in TYPES if kind not in kinds]}]
    if strings:
        options.append({"type": "string", "pattern": f"^{_other_strings(strings)}$"})
    if "boolean" in kinds and {True, False} - {value for value in values if isinstance(value, bool)}:
        options.append({"const": not next(value for value in values if isinstance(value, bool))})
    if numbers:
        options.append({"type": "number", "exclusiveMaximum": numbers[0]})
        options += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in itertools.pairwise(numbers)
        ]
        options.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    return _any_of(options)


def _other_strings(strings: list[str]) -> str:
    """A regular expression for every string but these.

    After each common beginning: nothing, if it is none of the strings; a character that none of them goes on with, and anything; or one that some go
    on with, and the same again.
    """
    if strings == [""]:
        return "(?s:.+)"
    following: dict[str, list[str]] = {}
    for string in strings:
        if string:
            following.setdefault(string[0], []).append(string[1:])
    options = [] if "" in strings else [""]
    options.append(f"[^{''.join(map(_escaped, following))}](?s:.*)")
    options += [_escaped(char) + _other_strings(rest) for char, rest in following.items()]
    return f"(?:{'|'.join(options)})"


def _escaped(char: str) -> str:
    return char if char.isalnum() and char.isascii() else rf"\x{{{ord(char):x}}}"


def _beyond(keyword: str, value: Json) -> Json | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    match keyword:
        case "minimum":
            return {"type": "number", "exclusiveMaximum": value}
        case "maximum":
            return {"type": "number", "exclusiveMinimum": value}
        case "exclusiveMinimum":
            return {"type": "number", "maximum": value}
        case "exclusiveMaximum":
            return {"type": "number", "minimum": value}
    for kind, least, most in (("string", "minLength", "maxLength"), ("array", "minItems", "maxItems")):
        if keyword == least:
            return {"type": kind, most: int(value) - 1} if value >= 1 else False
        if keyword == most:
            return {"type": kind, least: int(value) + 1}
    return None
