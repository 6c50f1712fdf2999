"""Objects that are closed because their schema lists `properties`, and those that are not."""

import itertools
import json
from typing import Annotated, Literal

import jsonschema_rs
import pydantic
import pytest
from grammar_harness import matcher, takes

from headrace.errors import RequestError

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
CLOSED = {"unevaluatedProperties": False}
KIND_A = {"properties": {"k": {"const": "x"}, "a": {"type": "integer"}}}
KIND_B = {"properties": {"k": {"const": "y"}, "b": {"type": "integer"}}}
KINDS = {"type": "object", "properties": {"k": {"enum": ["x", "y"]}}, "required": ["k"]}
CHOSEN = {"if": {"properties": {"k": {"const": "x"}}}, "then": {"properties": {"a": {}}, "required": ["a"]}, "else": B}
IF_X = {"if": {"properties": {"k": {"const": "x"}}}, "then": A}
IF_Y = {"if": {"properties": {"k": {"const": "y"}}}, "then": {**B, "required": ["b"]}}
C = {"properties": {"c": {}}}
NAMED = {"a": {"type": "integer"}, "b": {"type": "integer"}}

AS_CLOSED = [
    ({**A, "required": ["a"]}, {**A, "required": ["a"], **CLOSED}),
    ({**A, "required": ["b"]}, {**A, "required": ["b"], "allOf": [{"properties": {"b": True}}], **CLOSED}),
    ({"type": "object", "properties": {}}, {"const": {}}),
    ({"allOf": [A, B]}, {"allOf": [A, B], **CLOSED}),
    ({"$defs": {"A": A}, "$ref": "#/$defs/A", **B}, {"$defs": {"A": A}, "$ref": "#/$defs/A", **B, **CLOSED}),
    ({"anyOf": [A, B]}, {"anyOf": [{**A, **CLOSED}, {**B, **CLOSED}]}),
    ({"anyOf": [A, {"type": "array"}]}, {"anyOf": [{**A, **CLOSED}, {"type": "array"}]}),
    ({**KINDS, "anyOf": [A, B]}, {**KINDS, "anyOf": [A, B], **CLOSED}),
    ({**KINDS, "anyOf": [KIND_A, KIND_B]}, {**KINDS, "anyOf": [KIND_A, KIND_B], **CLOSED}),
    ({**KINDS, "oneOf": [KIND_A, KIND_B]}, {**KINDS, "oneOf": [KIND_A, KIND_B], **CLOSED}),
    ({**KINDS, **CHOSEN}, {**KINDS, **CHOSEN, **CLOSED}),
    ({**KINDS, "allOf": [IF_X, IF_Y]}, {**KINDS, "allOf": [IF_X, IF_Y], **CLOSED}),
    ({**KINDS, "allOf": [CHOSEN, {"anyOf": [C]}]}, {**KINDS, "allOf": [CHOSEN, {"anyOf": [C]}], **CLOSED}),
    ({**KINDS, "allOf": [CHOSEN]}, {**KINDS, "allOf": [CHOSEN], **CLOSED}),
    (
        {"properties": NAMED, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"properties": NAMED, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], **CLOSED},
    ),
    (
        {**A, "dependentSchemas": {"a": {**B, "required": ["b"]}}},
        {**A, "properties": {**A["properties"], "b": True}, "dependentSchemas": {"a": {**B, "required": ["b"]}}, **CLOSED},
    ),
    ({**A, "dependentRequired": {"a": ["b"]}}, {**A, "properties": {**A["properties"], "b": True}, "dependentRequired": {"a": ["b"]}, **CLOSED}),
    ({**A, "not": {"required": ["b"]}}, {**A, **CLOSED}),
    ({"items": A}, {"items": {**A, **CLOSED}}),
    ({**A, **CLOSED}, {**A, **CLOSED}),
    ({"allOf": [A, B], **CLOSED}, {"allOf": [A, B], **CLOSED}),
    ({"$defs": {"A": A}, "$ref": "#/$defs/A", **CLOSED}, {"$defs": {"A": A}, "$ref": "#/$defs/A", **CLOSED}),
    ({"additionalProperties": A, "not": {"required": ["k"]}}, {"additionalProperties": {**A, **CLOSED}, "not": {"required": ["k"]}}),
]  # fmt: skip
"""Schemas, and as what they are read."""

AS_WRITTEN = [
    {"type": "object"},
    {"type": "object", "required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {**A, "additionalProperties": True},
    {**A, "additionalProperties": {"type": "integer"}},
    {**A, "additionalProperties": False},
    {**A, "unevaluatedProperties": True},
    {"allOf": [A], "unevaluatedProperties": {}},
    {**A, "patternProperties": {"^b": {"type": "string"}}},
    {"allOf": [{**A, "additionalProperties": True}, B]},
    {"anyOf": [{**A, "additionalProperties": {"type": "string"}}, {"type": "object", "required": ["b"]}]},
    {"not": {"properties": {"a": {"type": "string"}}, "required": ["a"]}, "type": "object"},
    {"if": {"properties": {"a": {"type": "string"}}}, "then": {"required": ["b"]}, "type": "object"},
    {**A, "minProperties": 2, "required": ["a"]},
    {"$id": "https://example.org/s", "properties": {"a": {"$id": "b", **A}}},
]

MEMBERS = {"k": ["x", "y"], "a": [1, "x"], "b": [2, "y"], "c": [3]}
OBJECTS = [
    dict(zip(names, values, strict=True))
    for size in range(4)
    for names in itertools.combinations(MEMBERS, size)
    for values in itertools.product(*(MEMBERS[name] for name in names))
]
VALUES = [*OBJECTS, None, 1, [{}], [{"a": 1}], [{"a": 1, "c": 2}], {"a": {"a": 1}}, {"a": {"a": 1, "c": 2}}]


def _texts(value):
    if not isinstance(value, dict):
        return [json.dumps(value)]
    return [json.dumps({name: value[name] for name in names}) for names in itertools.permutations(value)]


def _wrong(schema, read_as, closes_objects=True):
    """The values that are not taken as a schema says."""
    oracle = jsonschema_rs.validator_for(read_as)
    made = matcher("json_schema", schema, closes_objects=closes_objects)
    return [value for value in VALUES if any(takes(made, text) for text in _texts(value)) != oracle.is_valid(value)]


@pytest.mark.parametrize(("schema", "read_as"), AS_CLOSED, ids=lambda part: json.dumps(part)[:80])
def test_an_object_that_lists_properties_has_no_others(schema, read_as):
    assert _wrong(schema, read_as) == []


@pytest.mark.parametrize("schema", AS_WRITTEN, ids=json.dumps)
def test_what_a_schema_says_itself_stands(schema):
    assert _wrong(schema, schema) == []


@pytest.mark.parametrize(("schema", "read_as"), AS_CLOSED[:4], ids=lambda part: json.dumps(part)[:80])
def test_objects_are_open_by_an_option_and_where_they_are_not_to_be_closed(schema, read_as):
    assert _wrong({**schema, "x-guidance": {"open_objects": True}}, schema) == []
    assert _wrong(schema, schema, closes_objects=False) == []


TREE = {"type": "object", "properties": {"a": {"type": "integer"}, "kids": {"items": {"$ref": "#/$defs/Leaf<int>"}}}}
LEAF = {
    "allOf": [
        {"$ref": "#/$defs/Tree"},
        {"properties": {"b": {"$ref": "#/$defs/Leaf<int>"}, "c": {"$ref": "#/$defs/Tree"}}},
    ]
}


def test_a_definition_is_open_as_a_part_and_closed_elsewhere():
    made = matcher("json_schema", {"$defs": {"Tree": TREE, "Leaf<int>": LEAF}, "$ref": "#/$defs/Leaf<int>"}, None, True)

    for value in ({"a": 1, "b": {"a": 2}}, {"kids": [{"b": {"a": 1}}], "c": {"a": 1, "kids": []}}):
        assert takes(made, json.dumps(value))
    for value in ({"d": 1}, {"b": {"d": 1}}, {"c": {"b": {}}}, {"kids": [{"d": 1}]}):
        assert not takes(made, json.dumps(value))


@pytest.mark.parametrize(
    "schema",
    [
        {"definitions": {"N": {**A, "properties": {"n": {"title": "N", "allOf": [{"$ref": "#/definitions/N"}]}}}}, "$ref": "#/definitions/N"},
        {"type": "object", "$defs": {"N": {**A, "properties": {"n": {"$ref": "#/$defs/N"}}}}, "$ref": "#/$defs/N"},
        {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"components": {"N": {**A, "properties": {"n": {"$ref": "#/components/N"}}}}, "$ref": "#/components/N"},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_recursive_schemas_are_closed_at_every_level(schema):
    made = matcher("json_schema", schema, closes_objects=True)

    assert takes(made, '{"n": {"n": {}}}')
    assert not takes(made, '{"n": {"n": {"b": 1}}}')


def test_what_a_condition_or_a_negation_refers_to_is_not_closed():
    definitions = {"A": {**A, "required": ["a"]}, "C": {"properties": {"a": {"const": 1}}, "required": ["a"]}}
    schema = {
        "$defs": definitions,
        "properties": {"a": {}, "b": {"not": {"$ref": "#/$defs/C"}}, "c": {"$ref": "#/$defs/C"}},
    }
    made = matcher("json_schema", schema, closes_objects=True)

    assert not takes(made, '{"b": {"a": 1, "z": 2}}')
    assert takes(made, '{"b": {"a": 2, "z": 2}}')
    assert takes(made, '{"c": {"a": 1}}')
    assert not takes(made, '{"c": {"a": 1, "z": 2}}')


def test_work_on_hostile_schemas_is_bounded():
    many = {"properties": {f"p{i}": {} for i in range(300)}}
    for schema in (
        {"allOf": [{"$ref": "#"}] * 1000, "properties": {}},
        {"properties": {}, "anyOf": [{"properties": {f"p{i}": {}}} for i in range(60)]},
        {"$defs": {"M": many}, "properties": {f"q{i}": {"allOf": [{"$ref": "#/$defs/M"}, A]} for i in range(300)}},
        {"properties": {"a": {"$ref": "#/anyOf/0/anyOf/0"}}, "anyOf": [{"anyOf": [{"$ref": "#"}]}]},
    ):
        try:
            matcher("json_schema", schema, closes_objects=True)
        except RequestError:
            pass


# --- schemas as pydantic writes them


class Address(pydantic.BaseModel):
    street: str
    tags: list[str] = []
    place: tuple[float, float] | None = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    home: Address | None = None


class Person(pydantic.BaseModel):
    name: str
    age: int | None = None
    address: Address
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")] | None = None
    friends: "list[Person]" = []
    scores: dict[str, Address] = {}
    either: Address | Cat | None = None


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int
    inner: Address | None = None


class Empty(pydantic.BaseModel):
    pass


HOME = Address(street="x", tags=["y"], place=(1.5, 2.0))
INSTANCES = [
    HOME,
    Person(name="Bob", address=HOME),
    Person(
        name="Bob",
        age=40,
        address=HOME,
        pet=Dog(kind="dog", home=HOME),
        friends=[Person(name="Al", address=HOME, pet=Cat(kind="cat"))],
    ),
    Person(name="Bob", address=HOME, scores={"any key": HOME}, either=Cat(kind="cat", lives=1)),
    pydantic.RootModel[list[Person]]([Person(name="Bob", address=HOME)]),
    pydantic.RootModel[Address | Cat](HOME),
    pydantic.create_model("Iterable<Person>", tasks=(list[Person], ...))(tasks=[Person(name="Bob", address=HOME)]),
    Empty(),
]


def _objects(value):
    """Every object in a value, but for those with keys of their own choice."""
    if isinstance(value, list):
        return [found for item in value for found in _objects(item)]
    if not isinstance(value, dict):
        return []
    inner = [value[name].values() if name == "scores" else [value[name]] for name in value]
    return [value, *(found for values in inner for item in values for found in _objects(item))]


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("instance", INSTANCES, ids=lambda one: type(one).__name__)
def test_models_of_pydantic_are_written_as_they_are_dumped_and_without_other_keys(instance, mode):
    made = matcher("json_schema", type(instance).model_json_schema(mode=mode), closes_objects=True)
    dumped = instance.model_dump(mode="json")

    assert takes(made, json.dumps(dumped))
    assert takes(made, json.dumps(instance.model_dump(mode="json", exclude_unset=mode == "validation")))
    for one in _objects(dumped):
        one["other"] = 1
        assert not takes(made, json.dumps(dumped))
        del one["other"]


class Train(pydantic.BaseModel):
    kind: Literal["train"] = "train"
    stops: "list[Annotated[Train | Car, pydantic.Field(discriminator='kind')]]" = []


class Car(pydantic.BaseModel):
    kind: Literal["car"] = "car"
    seats: int = 4


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_a_discriminator_is_there_although_it_has_a_default(mode):
    schema = pydantic.TypeAdapter(Annotated[Train | Car, pydantic.Field(discriminator="kind")]).json_schema(mode=mode)
    made = matcher("json_schema", schema, closes_objects=True)

    for value in (Train(), Train(stops=[Car(), Train(stops=[Car(seats=2)])]), Car(seats=1)):
        assert takes(made, value.model_dump_json())
    for text in ("{}", '{"seats": 1}', '{"kind": "train", "seats": 1}', '{"kind": "train", "stops": [{"seats": 1}]}'):
        assert not takes(made, text)


def test_a_model_of_pydantic_that_allows_more_has_more():
    made = matcher("json_schema", Open.model_json_schema(), closes_objects=True)

    assert takes(made, '{"a": 1, "inner": {"street": "x"}, "b": {"c": 2}}')
    assert not takes(made, '{"a": 1, "inner": {"street": "x", "b": 2}}')
