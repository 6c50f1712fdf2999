"""Objects without keys of the model's own: one that lists `properties` and says nothing of other keys is closed over those that it names.

Generators of schemas seldom write `additionalProperties: false`, and a model that may add keys does so until its output is cut. What is closed,
and over what, is as with `unevaluatedProperties: false`: the keys that the schema names, and those that are named by what applies beside it (`$ref`,
`allOf`, the options of `anyOf` and `oneOf`, `if`, `then`, `else`), in `required`, too. What the schema says itself (`additionalProperties`,
`patternProperties`, `unevaluatedProperties`) stands, and an object without `properties` stays open. A closed schema allows nothing that the schema
does not allow.

A schema has up to three versions: closed; as a part of another one, open itself while the values of its properties are closed; and the original,
within `not` and `if`, where closing would allow more.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, count, islice
from typing import Literal, NamedTuple

from headrace.grammar.schema_logic import SchemaLogic
from headrace.grammar.schema_walk import (
    CONSTRAINTS,
    ONE_SCHEMA,
    SCHEMA_BY_NAME,
    SCHEMA_LIST,
    Json,
    children,
    listed,
    pointer,
    subschemas,
    target,
)

_Version = Literal["closed", "part", "original"]

_OPTIONS = ("anyOf", "oneOf")
_DEPENDENT = ("dependentSchemas", "dependencies")
_DEFINITIONS = ("$defs", "definitions")
_IN_PLACE = frozenset({"allOf", *_OPTIONS, "if", "then", "else", "not", *_DEPENDENT})
"""Keywords whose schemas are about the same value."""

_MAX_OPTIONS = 300
"""Of an `anyOf` or `oneOf`, to be compared in pairs."""

_MAX_TOGETHER = 16
"""Options of one `anyOf` that are written together, because a value may be valid for several."""

_NOTHING: Mapping[int, dict[str, Json]] = {}


class _Beside(NamedTuple):
    """What holds beside a schema: the keys that are named there, and whether they are listed as properties."""

    names: tuple[str, ...] = ()
    lists: bool = False


_ALONE = _Beside()


class _Choice(NamedTuple):
    """A keyword some of whose schemas apply. is_inline: it is in the schema itself, and not behind a reference."""

    owner: dict[str, Json]
    keyword: str
    is_inline: bool


@dataclass(slots=True)
class _Group:
    """What the schemas that apply to one value say about its keys.

    names: listed as properties, in their order. others: named in `required` and the like. is_open: one says something of all other keys.
    least: the largest `minProperties`.
    """

    names: dict[str, None] = field(default_factory=dict)
    others: dict[str, None] = field(default_factory=dict)
    lists: bool = False
    is_open: bool = False
    least: float = 0
    choices: list[_Choice] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def add(self, keyword: str, value: Json) -> None:
        if keyword == "properties" and isinstance(value, dict):
            self.lists = True
            self.names.update(dict.fromkeys(value))
        elif keyword == "required":
            self.others.update(dict.fromkeys(_strings(value)))
        elif keyword == "unevaluatedProperties" and value is False:
            self.lists = True
        elif keyword in ("additionalProperties", "unevaluatedProperties") or (keyword == "patternProperties" and value):
            self.is_open = True
        elif keyword == "minProperties" and isinstance(value, int | float):
            self.least = max(self.least, value)
        elif keyword in ("dependentRequired", *_DEPENDENT) and isinstance(value, dict):
            for name, wanted in value.items():
                self.others.update(dict.fromkeys((name, *_strings(wanted))))

    def add_all(self, other: "_Group") -> None:
        self.names.update(other.names)
        self.others.update(other.others)
        self.lists |= other.lists
        self.is_open |= other.is_open

    def all_names(self, *more: str) -> tuple[str, ...]:
        return tuple({**self.names, **dict.fromkeys(more), **self.others})

    @property
    def is_silent(self) -> bool:
        return not (self.names or self.others or self.lists or self.is_open)


def close_objects(root: dict[str, Json], takes_one_of_as_any_of: bool) -> dict[str, Json]:
    """The schema with its objects closed; the same where its references cannot all be followed. `root` is not changed.

    takes_one_of_as_any_of: where the options of a `oneOf` cannot be shown to exclude each other; otherwise they stay as they are there.
    """
    if not all(_is_followed(root, part) for _, part in subschemas(root)):
        return root
    if not all(isinstance(root.get(keyword, {}), dict) for keyword in _DEFINITIONS):
        return root
    return _Closing(root, takes_one_of_as_any_of).closed()


def _is_followed(root: dict[str, Json], part: dict[str, Json]) -> bool:
    """Whether it is known what the references of a schema point at: a schema with an `$id` (`id`) of its own is a document of its own."""
    if "$dynamicRef" in part or "$recursiveRef" in part:
        return False
    if part is not root and any(isinstance(part.get(name), str) for name in ("$id", "id")):
        return False
    reference = part.get("$ref")
    return not isinstance(reference, str) or target(root, reference) is not None


class _Closing:
    def __init__(self, root: dict[str, Json], takes_one_of_as_any_of: bool) -> None:
        self._root = root
        self._takes_one_of_as_any_of = takes_one_of_as_any_of
        self._logic = SchemaLogic(root, follow=True)
        self._totals: dict[int, _Group] = {}
        self._in_place = {id(part) for part in _values(root)}
        self._names: dict[tuple[int, _Version], str] = {}
        self._waiting: list[tuple[str, dict[str, Json], _Version]] = []
        self._has_definitions = False

    def closed(self) -> dict[str, Json]:
        made = self._closed(self._root)
        self._has_definitions = True
        definitions: dict[str, Json] = {}
        while self._waiting:
            name, schema, version = self._waiting.pop()
            definitions[name] = self._closed(schema) if version == "closed" else self._copy(schema, version)
        if definitions:
            made["$defs"] = {**made.get("$defs", {}), **definitions}
        assert isinstance(made, dict), made
        return made

    # --- which objects are closed, and over what

    def _closed(self, schema: Json, beside: _Beside = _ALONE) -> Json:
        if schema is True and beside.lists:
            schema = {}
        if not isinstance(schema, dict):
            return schema
        if beside == _ALONE and (only := _only_part(schema)) is not None:
            return self._delegated(schema, *only)
        group = self._gather(schema, _Group())
        if group.is_open:
            return self._copy(schema, "part")
        named = [(choice, self._may_apply(choice)) for choice in group.choices]
        names = group.all_names(*beside.names)
        adding = [(choice, found) for choice, found in named if found.is_open or not {*found.all_names()} <= {*names}]
        lists = beside.lists or group.lists
        if not lists and not any(found.lists for _, found in named):
            return self._copy(schema, "part")
        if len(adding) == 1 and adding[0][0].is_inline:
            sides = self._closed_choice(adding[0][0], _Beside(names, lists))
            if sides is not None:
                return self._copy(schema, "part", {id(adding[0][0].owner): sides})
        changed = self._told_apart(adding, {*names})
        names = tuple(dict.fromkeys((*names, *(name for _, found in adding for name in found.all_names()))))
        made = self._copy(schema, "part", changed)
        properties = schema.get("properties", {})
        if any(found.is_open for _, found in adding) or group.least > len(names) or not isinstance(properties, dict):
            return made
        made["properties"] = {**made.get("properties", {}), **{name: True for name in names if name not in properties}}
        made["additionalProperties"] = False
        evaluated = {*group.names}.union(*(found.names for _, found in adding))
        if made.get("unevaluatedProperties") is False and {*names} <= evaluated:
            del made["unevaluatedProperties"]
        return made

    def _delegated(self, schema: dict[str, Json], keyword: str, index: int) -> Json:
        """A schema whose one part is closed."""
        changed = schema[keyword]
        if keyword == "$ref":
            changed = self._reference(changed, "closed")
        else:
            changed = [self._closed(part) if i == index else part for i, part in enumerate(changed)]
        rest = {name: value for name, value in schema.items() if name != keyword}
        return {**schema, **self._copy(rest, "part"), keyword: changed}

    def _closed_choice(self, choice: _Choice, beside: _Beside) -> dict[str, Json] | None:
        """A choice each of whose schemas is closed by itself, as keywords; None where that is not the same as closing all together."""
        owner, keyword, _ = choice
        if keyword in _OPTIONS:
            options = owner[keyword]
            together: list[Json] = []
            if (beside.lists and keyword == "anyOf") or (keyword == "oneOf" and not self._takes_one_of_as_any_of):
                overlaps = self._overlaps(owner, keyword) if len(options) <= _MAX_OPTIONS else None
                if overlaps is None or (overlaps and keyword == "oneOf"):
                    return None
                together = list(islice(self._together(options, overlaps), _MAX_TOGETHER + 1))
            if len(together) > _MAX_TOGETHER:
                return None
            return {keyword: [self._closed(option, beside) for option in (*options, *together)]}
        if keyword == "if" and self._logic.complement(owner["if"]) is not None:
            condition = self._total(owner["if"])
            if condition.is_open:
                return None
            inner = _Beside(condition.all_names(*beside.names), beside.lists)
            return {name: self._closed(owner.get(name, True), inner) for name in ("then", "else")}
        return None

    def _told_apart(self, choices: list[tuple[_Choice, _Group]], names: set[str]) -> dict[int, dict[str, Json]]:
        """Conditions, neither of whose sides has keys that only the other one names. names: those that are named without a choice."""
        told: dict[int, dict[str, Json]] = {}
        for choice, _ in choices:
            owner, keyword, is_inline = choice
            if keyword != "if" or not is_inline or self._logic.complement(owner["if"]) is None:
                continue
            elsewhere = names.union(*(found.all_names() for other, found in choices if other is not choice))
            elsewhere |= {*self._total(owner["if"]).all_names()}
            sides = [self._total(owner.get(name)).all_names() for name in ("then", "else")]
            for side, others in (("then", sides[1]), ("else", sides[0])):
                only = {name: False for name in others if name not in elsewhere and name not in sides[side == "else"]}
                if only:
                    kept = self._copy(owner.get(side, True), "part")
                    told.setdefault(id(owner), {})[side] = {"allOf": [kept, {"properties": only}]}
        return told

    def _overlaps(self, owner: dict[str, Json], keyword: str) -> set[tuple[int, int]]:
        """The pairs of options that are not shown to exclude each other."""
        context = self._logic.parts({name: value for name, value in owner.items() if name != keyword})
        return {
            (i, j)
            for (i, one), (j, other) in combinations(enumerate(owner[keyword]), 2)
            if not self._logic.exclude(one, other, context)
        }

    def _together(self, options: list[Json], overlaps: set[tuple[int, int]]) -> Iterator[Json]:
        """Several options at once, where a value may be valid for all of them and they name different keys."""
        named = [self._total(option) for option in options]
        sets = [{*group.all_names()} for group in named]
        waiting: deque[tuple[int, ...]] = deque(
            pair for pair in sorted(overlaps) if not any(named[i].is_open for i in pair)
        )
        while waiting:
            chosen = waiting.popleft()
            if set().union(*(sets[i] for i in chosen)) not in [sets[i] for i in chosen]:
                yield {"allOf": [options[i] for i in chosen]}
            waiting += [
                (*chosen, i)
                for i in range(chosen[-1] + 1, len(options))
                if not named[i].is_open and overlaps.issuperset((j, i) for j in chosen)
            ]

    def _gather(self, schema: Json, group: _Group, is_inline: bool = True) -> _Group:
        """Add what a schema says, and what applies with it."""
        if not isinstance(schema, dict) or id(schema) in group.seen:
            return group
        group.seen.add(id(schema))
        for keyword, value in schema.items():
            if keyword == "$ref" and isinstance(value, str):
                self._gather(target(self._root, value), group, False)
            elif keyword == "allOf" and isinstance(value, list):
                for part in value:
                    self._gather(part, group, is_inline)
            elif _is_choice(keyword, value):
                group.choices.append(_Choice(schema, keyword, is_inline))
            group.add(keyword, value)
        return group

    def _total(self, schema: Json) -> _Group:
        """What a schema says, with what applies and what may apply. Each is read once: one that leads to itself in place allows nothing."""
        if not isinstance(schema, dict):
            return _Group()
        if (known := self._totals.get(id(schema))) is None:
            known = self._totals[id(schema)] = _Group()
            for keyword, value in schema.items():
                if keyword == "$ref" and isinstance(value, str):
                    known.add_all(self._total(target(self._root, value)))
                elif keyword == "allOf" and isinstance(value, list):
                    for part in value:
                        known.add_all(self._total(part))
                elif _is_choice(keyword, value):
                    known.add_all(self._may_apply(_Choice(schema, keyword, True)))
                known.add(keyword, value)
        return known

    def _may_apply(self, choice: _Choice) -> _Group:
        """What a choice may say. A condition names keys, and lists none that the value has."""
        group = _Group()
        if choice.keyword == "if":
            group.add_all(self._total(choice.owner["if"]))
            group.lists = False
        for schema in _schemas_of(choice):
            group.add_all(self._total(schema))
        return group

    # --- versions

    def _copy(self, schema: Json, version: _Version, changed: Mapping[int, dict[str, Json]] = _NOTHING) -> Json:
        """A schema in the version `part` or `original`. changed: keywords of schemas in it, by their Python ids."""
        if not isinstance(schema, dict):
            return schema
        made: dict[str, Json] = {}
        for keyword, value in schema.items():
            if keyword == "$ref" and isinstance(value, str):
                made[keyword] = self._reference(value, version)
            elif keyword in ("if", "not"):
                made[keyword] = self._copy(value, "original")
            elif keyword in ("then", "else"):
                made[keyword] = self._copy(value, version, changed)
            elif keyword in _IN_PLACE:
                made[keyword] = _each(value, lambda inner: self._copy(inner, version, changed))
            elif keyword in _DEFINITIONS and schema is self._root and self._has_definitions:
                continue  # they are in the document already
            elif keyword in ONE_SCHEMA and isinstance(value, dict):
                made[keyword] = self._value(value, version)
            elif keyword in SCHEMA_LIST | SCHEMA_BY_NAME:
                made[keyword] = _each(value, lambda inner: self._value(inner, version))
            else:
                made[keyword] = value
        return made | changed.get(id(schema), {})

    def _value(self, schema: Json, version: _Version) -> Json:
        return self._copy(schema, "original") if version == "original" else self._closed(schema)

    def _reference(self, reference: str, version: _Version) -> str:
        found = target(self._root, reference)
        if not isinstance(found, dict):
            return reference
        if version == "part" and self._total(found).is_silent:
            version = "closed"
        if version == "closed" and id(found) in self._in_place:
            return reference
        key = (id(found), version)
        if key not in self._names:
            taken = {*self._root.get("$defs", {}), *self._names.values()}
            name = next(name for i in count(len(self._names)) if (name := f"{version}-{i}") not in taken)
            self._names[key] = name
            self._waiting.append((name, found, version))
        return pointer(["$defs", self._names[key]])


def _is_choice(keyword: str, value: Json) -> bool:
    return (
        (keyword in _OPTIONS and isinstance(value, list))
        or keyword == "if"
        or (keyword in _DEPENDENT and isinstance(value, dict))
    )


def _schemas_of(choice: _Choice) -> list[Json]:
    """The schemas that may apply, without a condition."""
    owner, keyword, _ = choice
    if keyword == "if":
        return [owner.get(name) for name in ("then", "else")]
    value = owner[keyword]
    return list(value.values()) if isinstance(value, dict) else list(value)


def _only_part(schema: dict[str, Json]) -> tuple[str, int] | None:
    """The one schema that says everything about the keys of a value (its keyword, and its place in a list): a reference, or the one in `allOf`."""
    said = {keyword for keyword in schema if keyword in CONSTRAINTS} - {"type"}
    if said == {"$ref"}:
        return "$ref", 0
    parts = schema.get("allOf")
    if said == {"allOf"} and isinstance(parts, list):
        saying = [i for i, part in enumerate(parts) if not isinstance(part, dict) or part.keys() & CONSTRAINTS]
        return ("allOf", saying[0]) if len(saying) == 1 else None
    return None


def _values(root: dict[str, Json]) -> Iterator[dict[str, Json]]:
    """The schemas that are closed where they are: of the document, of its definitions, and of values inside these."""
    waiting: list[Json] = [root]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        inside = {keyword: value for keyword, value in schema.items() if keyword not in _IN_PLACE}
        waiting += [part for _, part in children("#", inside)]


def _each(value: Json, make: Callable[[Json], Json]) -> Json:
    """A list or an object of schemas, each made anew."""
    if isinstance(value, list):
        return [make(item) for item in value]
    return {name: make(item) for name, item in value.items()} if isinstance(value, dict) else value


def _strings(value: Json) -> list[str]:
    return [item for item in listed(value) if isinstance(item, str)]
