"""Values of parameters that are written as text, by their schemas."""

import json

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing.response_parser import _coerce, _schema_types

from headrace.parsers.parameters import ArgumentsWriter, coerced, schema_types

SCHEMAS = (
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string"},
    {"type": "object"},
    {"type": "array"},
    {"type": ["integer", "null"]},
    {"type": ["string", "number"]},
    {"anyOf": [{"type": "boolean"}, {"type": "integer"}]},
    {"oneOf": [{"type": "array"}, {"type": "null"}]},
    {"type": "integer", "nullable": True},
    {},
)
TEXTS = (
    "7",
    " 7\n",
    "-7",
    "7.0",
    "7.5",
    "1e3",
    "1e400",
    ".5",
    "true",
    "False",
    "0",
    "1",
    "null",
    "None",
    "{}",
    '{"a": 1}',
    "[1, 2]",
    "[1",
    "text",
    "",
    " ",
    '"7"',
    "nan",
    "inf",
)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_value_becomes_what_transformers_makes_of_it(schema):
    for text in TEXTS:
        assert json.loads(coerced(text, schema_types(schema, {}))) == _coerce(text, _schema_types(schema)), text


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.text(st.sampled_from('0123456789.eE+-_ntruefalsN{}[]":, x'), max_size=8), st.sampled_from(SCHEMAS))
def test_whatever_the_text_the_value_is_json(text, schema):
    types = schema_types(schema, {})
    value = json.loads(coerced(text, types))

    assert value == text or jsonschema_rs.is_valid({"type": list(types)}, value)


def test_types_of_references_and_lists_of_values():
    root = {"$defs": {"a/b": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a~1b"}]}}}

    assert schema_types({"$ref": "#/$defs/a~1b"}, root) == ("integer",)
    generated = {"$defs": {"Page[int, <a b>]": {"type": "integer"}}}
    for written in ("Page[int, <a b>]", "Page%5Bint%2C%20%3Ca%20b%3E%5D"):
        assert schema_types({"$ref": f"#/$defs/{written}"}, generated) == ("integer",)
    assert schema_types({"$ref": "#/$defs/none"}, root) == ()
    assert schema_types({"$ref": "other.json"}, root) == ()
    assert schema_types({"enum": ["a", 1, 1.5, None, True, [], {}]}, {}) == (
        "string",
        "integer",
        "number",
        "null",
        "boolean",
        "array",
        "object",
    )
    assert schema_types({"const": 3}, {}) == ("integer",)


def test_numbers_keep_their_digits_and_what_is_too_long_is_text():
    assert coerced("123456789012345678901234567890", ("integer",)) == "123456789012345678901234567890"
    assert coerced("9" * 5000, ("integer",)) == json.dumps("9" * 5000)


def test_what_cannot_be_encoded_is_escaped():
    writer = ArgumentsWriter({})
    writer.key("a")
    text = writer.begin_value("schema", False) + writer.value("x\ud800") + writer.end_value() + writer.close()

    assert text.encode()
    assert json.loads(text) == {"a": "x\ud800"}


def test_references_to_one_schema_from_many_places_are_followed_once():
    """Each of the paths through these would take longer than any test."""
    circle = {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}] * 50 + [{"type": "integer"}]}}}
    chain = {"$defs": {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 100} for i in range(7)}}
    chain["$defs"]["n7"] = {"type": ["string", "null"]}

    assert schema_types({"$ref": "#/$defs/n"}, circle) == ("integer",)
    assert schema_types({"$ref": "#/$defs/n0"}, chain) == ("string", "null")
