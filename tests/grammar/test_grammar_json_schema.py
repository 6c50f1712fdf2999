"""JSON schemas: what is accepted and what is refused, compared with a validator of JSON Schema."""

import itertools
import json
import random

import jsonschema_rs
import pytest
from grammar_harness import json_takes, matcher, random_output, refusal, takes
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schemas import SCHEMAS

from headrace.errors import RequestError

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}


# --- whitespace


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_json_may_be_printed_with_any_indent(indent):
    assert json_takes(OBJECT, {"a": 1, "b": "x", "c": [[{"d": [1, 2]}]]}, indent=indent)


def test_json_may_be_compact():
    assert takes(matcher("json_schema", OBJECT), '{"a":1,"b":"x"}')


@pytest.mark.parametrize(
    "text", ['{  "a": 1}', '{\n\n"a": 1}', '{"a": 1   }', ' {"a": 1}', '{"a": 1}\n', "{" + "\n" + " " * 60 + '"a": 1}']
)
def test_whitespace_is_bounded(text):
    assert not takes(matcher("json_schema", OBJECT), text)


def test_the_schema_may_choose_its_whitespace():
    compact = matcher("json_schema", {**OBJECT, "x-guidance": {"whitespace_flexible": False}})
    free = matcher("json_schema", {**OBJECT, "x-guidance": {"whitespace_flexible": True}})

    assert takes(compact, '{"a":1}')
    assert not takes(compact, '{"a": 1}')
    assert takes(free, '{\n\n\n      "a": 1}')


# --- options


@pytest.mark.parametrize(
    "options, said",
    [
        ({"lenient": True}, "`lenient`"),
        ({"lenient": 1}, "`lenient`"),
        ({"no_such": 1}, "no_such"),
        ({"json_allowed_escapes": "n"}, "json_allowed_escapes"),
        ({"coerce_one_of": "yes"}, "coerce_one_of"),
        ([], "x-guidance"),
    ],
)
def test_options_that_are_not_allowed_are_refused(options, said):
    assert said in refusal("json_schema", {"x-guidance": options})


def test_one_of_may_be_coerced_by_the_schema():
    schema = {"oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}]}

    message = refusal("json_schema", {"properties": {"a/b": schema}})

    assert "`oneOf`" in message
    assert "#/properties/a~1b/oneOf" in message
    assert "coerce_one_of" in message
    assert json_takes({**schema, "x-guidance": {"coerce_one_of": True}}, 15)


# --- formats


def test_unknown_formats_are_annotations():
    schema = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "colour"}},
        "required": ["format"],
    }

    assert json_takes(schema, {"format": "red"})


def test_known_formats_hold():
    assert json_takes({"type": "string", "format": "date"}, "2026-11-22")
    assert not json_takes({"type": "string", "format": "date"}, "tomorrow")


@pytest.mark.parametrize("keyword", ["const", "default", "examples"])
def test_a_format_in_a_value_is_a_value(keyword):
    value = {"format": "colour"}
    schema = {keyword: [value] if keyword == "examples" else value}

    assert json_takes(schema, value)
    if keyword == "const":
        assert not json_takes(schema, {})


def test_formats_in_every_kind_of_subschema_and_behind_references():
    text = {"type": "string", "format": "colour"}
    schema = {
        "$defs": {"a": text},
        "definitions": {"b": text},
        "components": {"schemas": {"c": text}},
        "properties": {
            "const": {"$ref": "#/$defs/a"},
            "enum": {"$ref": "#/definitions/b"},
            "c": {"$ref": "#/components/schemas/c"},
            "d": {"type": "array", "prefixItems": [text], "items": {"anyOf": [text, {"allOf": [text]}]}},
        },
        "patternProperties": {"^x": text},
        "additionalProperties": text,
    }

    assert json_takes(schema, {"const": "u", "enum": "v", "c": "w", "d": ["x", "y"], "xx": "z", "e": "f"})


# --- patterns


@pytest.mark.parametrize(
    "pattern, valid, invalid",
    [
        ('^[^"]*$', ["", "a\\b", "é\n"], ['"', 'a"b']),
        (r"^[^\\]+$", ['"', "a"], ["\\", "a\\"]),
        ("^[^-a]$", ["b", '"', "+"], ["-", "a"]),
        (r"^\[\^-\]$", ["[^-]"], ["b"]),
        (r"^\S\D\W$", ['""!', "\\\\\\"], ["  1"]),
        ("b$", ["ab", "b"], ["a", "ba"]),
        (r"^(?:b|\x01|[\u007f\v])b$", ["bb"], ["b"]),
        ("[b-d]{2,300}", ["bb", "abdba"], ["b", "bab"]),
        (r"^a\{2,3}", ["a{2,3}"], ["aa", "aaa", "a{2}"]),
        (r"^[^\x0bb]$", ["a", '"'], ["b", ""]),
        (r"^[\x00-!#-~]$", ["!", "\\", "a", "\n"], ['"', "é"]),
        (r"^[\u0000-\u001f]|a$", ["\n", "a"], ['"', "\\"]),
        (r"^\P{P}$", ["a", "+"], ['"', "\\", "!"]),
        (r"^[^\P{P}]$", ["!", '"', "\\"], ["a", "+"]),
        (r"^\p{Cc}$", ["\n"], ['"', "\\", "a"]),
        ("^[[a]]$", ["a]", "[]"], ["a", "]"]),
        ("^[a&&b~~]$", ["a", "b", "&", "~"], ["&&", "~~", ""]),
        ('^[^"&&a]$', ["b", "["], ['"', "a", "&"]),
    ],
)
def test_patterns_hold_for_quotes_and_backslashes(pattern, valid, invalid):
    schema = {"type": "string", "pattern": pattern}

    assert [value for value in valid if not json_takes(schema, value)] == []
    assert [value for value in invalid if json_takes(schema, value)] == []


@pytest.mark.parametrize("pattern", ['^[^"]*$', r"^[^\\]+$", "^[^a]$", r"^\S+$", "^.$", "^a"])
@pytest.mark.parametrize("others", [False, {"type": "string"}], ids=["closed", "open"])
def test_patterns_of_names_hold_for_quotes_and_backslashes(pattern, others):
    schema = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": others}
    oracle = jsonschema_rs.validator_for(schema)
    values = [{name: value} for name in ("", "a", "b", '"', 'a"', "\\", "b\\", "\n", "é", " ") for value in (1, "x")]

    assert [value for value in values if json_takes(schema, value) != oracle.is_valid(value)] == []


@pytest.mark.parametrize("written", [r"\u0061", r"\u000a", r"\u000A", r"\ud800", r"\u0022"])
def test_a_property_has_one_name(written):
    """Whoever reads the JSON finds a property of the schema with a value that it does not allow; or no Unicode."""
    known = {"type": "object", "properties": {"a": {"type": "integer"}, "\n": {"type": "integer"}, '"': False}}
    for schema in (known, {"patternProperties": {'^[a\n"]': {"type": "integer"}}, **known}):
        assert not takes(matcher("json_schema", schema), f'{{"{written}": "x"}}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 2},
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 3, "required": ["a"]},
        {"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": False, "minProperties": 2.0},
        {"anyOf": [{"minProperties": 2}]},
    ],
    ids=json.dumps,
)
def test_names_that_repeat_do_not_count_twice(schema):
    assert "could repeat" in refusal("json_schema", schema)


def test_one_further_name_may_be_wanted():
    schema = {"type": "object", "required": ["a"], "minProperties": 2}

    assert json_takes(schema, {"a": 1, "b": 2})
    assert not json_takes(schema, {"a": 1})
    assert not takes(matcher("json_schema", schema), '{"a": 1, "a": 2}')


# --- schemas


def test_keywords_keep_their_order():
    schema = {
        "type": "object",
        "anyOf": [{"properties": {"z": {"type": "integer"}}}],
        "properties": {"a": {"type": "integer"}},
    }

    assert json_takes(schema, {"z": 1, "a": 2})
    assert not json_takes(schema, {"a": 2, "z": 1})


def test_the_order_of_properties_is_the_schemas():
    assert json_takes(OBJECT, {"a": 1, "b": "x", "c": True})
    assert not json_takes(OBJECT, {"b": "x", "a": 1})


@pytest.mark.parametrize("schema", [True, {}])
def test_a_schema_may_allow_any_json(schema):
    for value in ({"a": [1, None, "x"]}, [], "", 1.5e3, False):
        assert json_takes(schema, value)


def test_a_schema_of_any_object():
    assert json_takes({"type": "object"}, {"a": {"b": []}})
    assert not json_takes({"type": "object"}, [])


@pytest.mark.parametrize(
    "dialect", ["http://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-04/schema#"]
)
def test_schemas_of_older_drafts(dialect):
    schema = {
        "$schema": dialect,
        "definitions": {"n": {"type": "integer", "minimum": 1}},
        "items": {"$ref": "#/definitions/n"},
    }

    assert json_takes(schema, [1, 2])
    assert not json_takes(schema, [0])


def test_what_is_beside_a_reference_counts_since_draft_2019():
    schema = {"definitions": {"n": {"type": "integer"}}, "items": {"$ref": "#/definitions/n", "minimum": 5}}

    assert json_takes({"$schema": "http://json-schema.org/draft-07/schema#", **schema}, [1])
    assert not json_takes(schema, [1])
    assert json_takes(schema, [5])


@pytest.mark.parametrize("draft, is_known", [("04", False), ("06", False), ("07", True)])
def test_keywords_count_from_the_draft_that_has_them(draft, is_known):
    condition = {"if": {"minimum": 5}, "then": {"multipleOf": 2}, "type": "integer"}
    made = matcher("json_schema", {"$schema": f"http://json-schema.org/draft-{draft}/schema#", **condition})

    assert takes(made, "6")
    assert takes(made, "7") is not is_known


def test_recursive_schemas():
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}

    assert json_takes(schema, {"next": {"next": {}}})
    assert not json_takes(schema, {"next": {"next": 1}})


@pytest.mark.parametrize(
    "name, written",
    [
        ("Animal<Dog>", "Animal<Dog>"),
        ("Animal<Dog>", "Animal%3CDog%3E"),
        ("Page[Dict[str, int]]", "Page[Dict[str, int]]"),
        ("Result`2[[A],[B]]", "Result`2[[A],[B]]"),
        ("a b", "a b"),
        ("a b", "a%20b"),
        ("a%20b", "a%20b"),
        ("50%", "50%"),
        ("a/b", "a~1b"),
        ("github.com/x/y.Type", "github.com/x/y.Type"),
        ("a~b", "a~0b"),
        ("Größe", "Größe"),
        ('"{a|b}^#\\', '"{a|b}^#\\'),
    ],
)
def test_names_in_references_may_be_as_generators_write_them(name, written):
    schema = {"$defs": {name: {"type": "integer"}}, "items": {"$ref": f"#/$defs/{written}"}}

    assert json_takes(schema, [1])
    assert not json_takes(schema, ["x"])


INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    "bounds",
    [
        INT64,
        {"minimum": 0, "maximum": 2**64 - 1},
        {"exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63},
        {"minimum": float(-(2**63)), "maximum": float(2**63)},
        {"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        {"minimum": -3.4028235e38, "maximum": 3.402823466e38},
        {"minimum": -79228162514264337593543950335, "maximum": 79228162514264337593543950335},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "maximum": 1.7976931348623157e308,
            "exclusiveMaximum": True,
        },
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "null"]], ids=str)
def test_bounds_that_are_those_of_a_type_are_no_bounds(kind, bounds):
    schema = {"type": "object", "properties": {"a": {"type": kind, **bounds}}, "required": ["a"]}

    assert [value for value in (0, 5, 2**63 - 1) if not json_takes(schema, {"a": value})] == []
    assert json_takes(schema, {"a": -5}) is (bounds.get("minimum") != 0)
    assert not json_takes(schema, {"a": "5"})


def test_bounds_that_can_be_held_hold():
    small = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}

    assert [value for value in (2**31, -(2**31) - 1) if json_takes(small, value)] == []
    assert not json_takes({"type": "integer", **INT64}, 2**63)


@pytest.mark.parametrize("most", [2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, 10**30])
def test_counts_that_nothing_reaches_are_no_bounds(most):
    for kind, keyword, value in (("string", "maxLength", "a"), ("array", "maxItems", [1])):
        assert json_takes({"type": kind, keyword: most}, value)
    assert json_takes({"properties": {"a": {}}, "maxProperties": most}, {"a": 1})


@pytest.mark.parametrize("beside", [{"x-order": 1}, {"deprecated": True}, {"discriminator": {"propertyName": "a"}}])
def test_annotations_beside_a_recursive_reference_say_nothing(beside):
    schema = {"type": "object", "properties": {"next": {"$ref": "#", **beside}}, "additionalProperties": False}

    assert json_takes(schema, {"next": {"next": {}}})
    assert not json_takes(schema, {"next": 1})


@pytest.mark.parametrize(
    "schema, said, place",
    [
        ({"items": {"contains": {"type": "string"}}}, "`contains`", "#/items/contains"),
        ({"properties": {"not": {"not": {"pattern": "a"}}}}, "`not`", "#/properties/not/not"),
        ({"$defs": {"x": {"uniqueItems": True}}, "$ref": "#/$defs/x"}, "`uniqueItems`", "#/$defs/x/uniqueItems"),
        ({"$ref": "https://example.org/schema"}, "'https://example.org/schema'", "#/$ref"),
        ({"items": {"$ref": "#/nowhere"}}, "'/nowhere'", "#/items/$ref"),
        ({"items": {"$ref": "#/$defs/No<where>"}}, "'#/$defs/No<where>'", "#/items/$ref"),
        ({"items": {"type": "number", "maximum": 1e30}}, "`maximum`", "#/items"),
        ({"items": {"type": "integer", "minimum": -(10**30)}}, "`minimum`", "#/items"),
        ({"items": {"pattern": "(?=a)b"}}, "look-around", "#/items"),
        ({"items": {"pattern": r"(\d/)\1"}}, "backreferences", "#/items"),
        ({"patternProperties": {"a": {}, "b": {}}}, "`patternProperties`", "#/patternProperties"),
        ({"type": "strnig"}, "'strnig'", "#/type"),
        ({"items": {"minLength": -1}}, "`minLength`", "#/items/minLength"),
        ({"items": {"minimum": "1"}}, "`minimum`", "#/items/minimum"),
        ({"items": {"properties": []}}, "`properties`", "#/items/properties"),
        ({"items": {"multipleOf": 0}}, "`multipleOf`", "#/items/multipleOf"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a'", "#/required"),
        ({"properties": {"a": {}}, "minProperties": 1}, "`minProperties`", "#"),
        ({"items": {"minProperties": 2}}, "`minProperties`", "#/items/minProperties"),
        ({"items": {"const": {"a": ["b\x01"]}}}, "control characters in `const`", "#/items/const"),
        ({"enum": ["\x7f"]}, "control characters in `enum`", "#/enum"),
        ({"items": {"const": {"a": [-(2**63)]}}}, "-9223372036854775808 in `const`", "#/items/const"),
        ({"enum": [1, -(2**63) + 1]}, "-9223372036854775807 in `enum`", "#/enum"),
        ({"enum": [1, -(2.0**63)]}, "in `enum`", "#/enum"),
        ({"properties": {"id": {"enum": [2**53 + 1]}}}, "9007199254740993 in `enum`", "#/properties/id/enum"),
        ({"const": 2**64 - 1}, "18446744073709551615 in `const`", "#/const"),
        ({"patternProperties": {"^[^a]": {}, "^[^b]": {}}}, "/^[^b]/", "#/patternProperties"),
        ({"patternProperties": {"^[^a]": {}, r"^[^a]\1": {}}}, "backreferences", "#"),
    ],
)
def test_a_refusal_names_the_keyword_and_its_place(schema, said, place):
    message = refusal("json_schema", schema)

    assert said in message
    assert f"(at {place})" in message


@pytest.mark.parametrize(
    "schema", [False, {"enum": []}, {"$ref": "#"}, {"type": "string", "minLength": 2, "maxLength": 1}, {"not": {}}]
)
def test_a_schema_that_allows_nothing_is_refused(schema):
    assert "allows no" in refusal("json_schema", schema)


@pytest.mark.parametrize("text", ["{", "[]", "3", '"x"', "null", "NaN", '{"const": "\\ud800"}', '{"const": 1e999}'])
def test_what_is_no_schema_is_refused(text):
    refusal("json_schema", text)


# --- keywords that are written with others

REWRITTEN = [
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": {"type": "array"}, "b": {"const": "x"}}},
    {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
    {
        "type": "object",
        "required": ["kind"],
        "oneOf": [
            {"properties": {"kind": {"const": "x"}, "a": {"type": "integer"}}},
            {"properties": {"kind": {"const": "y"}, "b": {"type": "integer"}}},
        ],
    },
    {"oneOf": [{"enum": ["a", "ab"]}, {"type": "string", "pattern": "^x"}]},
    {"oneOf": [{"const": "x"}, {"type": "string", "format": "date"}]},
    {"oneOf": [{"enum": ["abc", None]}, {"type": "string", "maxLength": 2}]},
    {"oneOf": [{"enum": [1, 2.5]}, {"type": "integer", "multipleOf": 2, "minimum": 3}]},
    {"oneOf": [{"enum": [2.5, "a"]}, {"type": ["integer", "null"], "multipleOf": 2}]},
    {"oneOf": [{"const": [1]}, {"type": "array", "minItems": 2, "uniqueItems": False}]},
    {"oneOf": [{"const": {"b": 1}}, {"type": "object", "required": ["a"], "properties": {"a": {"pattern": "^x"}}}]},
    {
        "type": "object",
        "oneOf": [
            {"properties": {"a": {"enum": ["y", 1]}}, "required": ["a"]},
            {"properties": {"a": {"type": "string", "pattern": "^x$"}}, "required": ["a"]},
        ],
    },
    {"not": {"type": "string"}},
    {"not": {"enum": ["", "a", "ab", "b", "[", "\\"]}, "type": "string"},
    {"not": {"const": 3}, "type": "integer"},
    {"not": {"const": True}},
    {"not": {"required": ["a", "b"]}, "type": "object"},
    {"not": {"anyOf": [{"required": ["a"]}, {"properties": {"b": {"type": "string"}}}]}},
    {"not": {"minLength": 2, "type": "string"}},
    {"type": "array", "not": {"maxItems": 1}},
    {"type": "integer", "not": {"minimum": 2}},
    {"if": {"properties": {"a": {"const": "x"}}, "required": ["a"]}, "then": {"required": ["b"]}, "type": "object"},
    {"if": {"type": "number"}, "then": {"minimum": 3}, "else": {"type": "string"}},
    {"if": {"type": "integer"}, "else": {"type": "string"}},
    {"if": {"type": "integer"}},
    {"then": {"type": "integer"}},
    {"dependencies": {"a": ["b"], "b": {"properties": {"a": {"type": "string"}}}}, "type": "object"},
    {"dependentRequired": {"a": ["b", "c"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}, "properties": {"a": {}, "b": {}}},
    {"uniqueItems": False, "type": "array"},
    {"type": "array", "maxItems": 1.0, "uniqueItems": True},
    {"type": "object", "required": ["a"], "minProperties": 1, "properties": {"a": {}, "b": {}}},
    {"propertyNames": {"type": "string"}, "maxContains": 1},
]

VALUES = [
    None, True, False, 0, 1, 2, 3, 4, 2.5, -1, "", "a", "ab", "abc", "b", "[", "\\", "x", "é", [], [1], [1, 2], [[], {}],
    {}, {"a": 1}, {"a": "x"}, {"a": "y"}, {"b": 1}, {"b": "x"}, {"a": 1, "b": 2}, {"a": "x", "b": "y"}, {"a": 1, "b": 2, "c": 3},
    {"kind": "x", "a": 1}, {"kind": "x", "a": "s"}, {"kind": "y", "b": 1}, {"kind": "y", "b": "s"}, {"kind": "z"}, {"c": 1},
]  # fmt: skip


def _texts(value):
    """A value as JSON, its properties in every order."""
    if not isinstance(value, dict):
        return [json.dumps(value, ensure_ascii=False)]
    return [json.dumps({name: value[name] for name in names}) for names in itertools.permutations(value)]


@pytest.mark.parametrize("schema", REWRITTEN, ids=json.dumps)
def test_keywords_that_are_written_with_others_allow_the_same(schema):
    oracle = jsonschema_rs.validator_for({"$schema": "http://json-schema.org/draft-07/schema#", **schema})
    if "dependentRequired" in schema or "dependentSchemas" in schema or "maxContains" in schema:
        oracle = jsonschema_rs.validator_for(schema)
    made = matcher("json_schema", schema)

    wrong = [value for value in VALUES if any(takes(made, text) for text in _texts(value)) != oracle.is_valid(value)]

    assert wrong == []
    assert {oracle.is_valid(value) for value in VALUES} != {False}


def test_options_of_one_of_that_a_literal_may_match_are_refused():
    for other in ({"pattern": "^[a-z]+$"}, {"pattern": r"(?=a)\w"}):
        refusal("json_schema", {"oneOf": [{"enum": ["inherit", "fast"]}, {"type": "string", **other}]})


def test_a_rewritten_one_of_keeps_the_order_of_properties():
    schema = {
        "type": "object",
        "oneOf": [
            {"properties": {"z": {"type": "integer"}}, "required": ["z"]},
            {"properties": {"z": {"type": "string"}}, "required": ["z"]},
        ],
        "properties": {"a": {"type": "integer"}},
    }

    assert json_takes(schema, {"z": 1, "a": 2})


def test_what_a_reference_points_into_is_not_moved():
    schema = {
        "properties": {
            "a": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
            "b": {"$ref": "#/properties/a/oneOf/0"},
        },
        "additionalProperties": False,
    }

    assert json_takes(schema, {"a": "x", "b": 1})
    assert not json_takes(schema, {"a": "x", "b": "y"})


def test_work_on_hostile_schemas_is_bounded():
    option = {"properties": {f"p{i}": {"enum": [f"v{i}{j}" for j in range(20)]} for i in range(40)}}
    deep = {"type": "object"}
    for _ in range(20):
        deep = {"not": {"properties": {"a": deep}, "required": ["a"]}}
    for schema in (
        {"oneOf": [option] * 200},
        {"allOf": [{"$ref": "#"}] * 1000, "oneOf": [{"$ref": "#"}] * 200},
        {"dependencies": {f"a{i}": ["b"] for i in range(500)}},
        {"not": {"$ref": "#"}},
        {"not": {"enum": ["x" * 100_000]}},
        {"items": {"not": {"$ref": "#"}}},
        deep,
    ):
        try:
            matcher("json_schema", schema)
        except RequestError:
            pass


# --- random schemas and random outputs


@settings(max_examples=60)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1), closes_objects=st.booleans())
def test_random_outputs_are_valid(schema, seed, closes_objects):
    try:
        made = matcher("json_schema", schema, closes_objects=closes_objects)
    except RequestError:
        return
    text = random_output(made, random.Random(seed))
    if text is not None:
        jsonschema_rs.validator_for(schema).validate(json.loads(text))


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**62, 2**63 - 1, 2**53 + 2, 1.5])
def test_a_large_number_that_is_a_literal_is_written_as_it_stands(value):
    assert json_takes({"const": value}, value)
    assert not json_takes({"const": value}, value - 0.5 if value == 1.5 else value - 1)
