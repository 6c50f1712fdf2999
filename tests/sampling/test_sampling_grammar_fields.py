"""The fields that constrain the output: at most one, well-formed, and as one text each."""

import json

import pytest

from headrace.errors import RequestError
from headrace.messages.grammar import GrammarSpec
from headrace.sampling.grammar_fields import GRAMMAR_KINDS, MAX_GRAMMAR_BYTES, GrammarFields

FORMAT = {"type": "any_text"}
STRUCTURES = [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}]
TEXTS = [
    ("json_schema", {"b": 1, "a": [1.5, None]}, '{"b":1,"a":[1.5,null]}'),
    ("json_schema", ' {"b" : 1, "a": [1.5,null] } ', '{"b":1,"a":[1.5,null]}'),
    ("json_schema", True, "true"),
    ("json_schema", "true", "true"),
    ("json_schema", "false", "false"),
    ("json_schema", "{}", "{}"),
    ("json_schema", '{"maximum": 18446744073709551616}', '{"maximum":18446744073709551616}'),
    ("json_schema", {"const": "é\u2028"}, '{"const":"é\u2028"}'),
    ("regex", " [a-z]+ ", " [a-z]+ "),
    ("ebnf", 'root ::= "a"', 'root ::= "a"'),
    ("lark", 'start: "a"', 'start: "a"'),
    ("choice", ["yes", "no", "yes"], '["yes","no","yes"]'),
    ("structural_tag", {"format": FORMAT}, '{"type":"structural_tag","format":{"type":"any_text"}}'),
    (
        "structural_tag",
        '{"format": {"type": "any_text"}, "type": "structural_tag"}',
        '{"type":"structural_tag","format":{"type":"any_text"}}',
    ),
    (
        "structural_tag",
        {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<f"]},
        '{"structures":[{"begin":"<f>","schema":{"type":"object"},"end":"</f>"}],"triggers":["<f"]}',
    ),
]


def nested(depth: int) -> object:
    value: object = {}
    for _ in range(depth):
        value = {"items": value}
    return value


REFUSED = [
    ("json_schema", "{", "not valid JSON: it ends too early"),
    ("json_schema", '{"a":}', r"not valid JSON: invalid character \(byte 5\)"),
    ("json_schema", "{} {}", r"not valid JSON: trailing characters \(byte 4\)"),
    ("json_schema", " ", "not valid JSON"),
    ("json_schema", "NaN", "not valid JSON"),
    ("json_schema", '{"maximum": 1e999}', "not valid JSON: number out of range$"),
    ("json_schema", "[]", "must be a JSON object or a boolean, got a list"),
    ("json_schema", "null", "must be a JSON object or a boolean, got null"),
    ("json_schema", '"a"', "must be a JSON object or a boolean, got a string"),
    ("json_schema", "7", "must be a JSON object or a boolean, got a number"),
    ("json_schema", nested(3000), "nested too deeply"),
    ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000, "nested too deeply"),
    ("json_schema", "[" * 100_000, "nested too deeply"),
    ("json_schema", {"const": object()}, "cannot be written as JSON"),
    ("json_schema", {"const": "\ud800"}, "lone surrogate"),
    ("regex", "\ud800", "lone surrogate"),
    ("choice", ["a", "\ud800"], "lone surrogate"),
    ("choice", ["a", ""], "a string is empty"),
    ("structural_tag", "true", "must be a JSON object, got a boolean"),
    ("structural_tag", {"type": "object"}, 'its type must be "structural_tag"'),
    ("structural_tag", {"type": "structural_tag"}, "either format, or structures and triggers"),
    ("structural_tag", {"structures": STRUCTURES}, "either format, or structures and triggers"),
    ("structural_tag", {"structures": [], "triggers": ["a"]}, "either format, or structures and triggers"),
]


@pytest.mark.parametrize(("field", "value", "text"), TEXTS, ids=range(len(TEXTS)))
def test_a_grammar_is_one_text_with_fields_in_their_order(field, value, text):
    assert GrammarFields(**{field: value}).grammar_spec() == GrammarSpec(field, text, field)


@pytest.mark.parametrize("field", GRAMMAR_KINDS)
def test_an_empty_field_asks_for_nothing(field):
    for empty in (None, False, "", [], {}):
        assert GrammarFields(**{field: empty}).grammar_spec() is None


@pytest.mark.parametrize(("field", "value", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_well_formed_is_refused_by_name(field, value, words):
    with pytest.raises(RequestError, match=words) as refusal:
        GrammarFields(**{field: value}).grammar_spec()
    assert refusal.value.param == field
    assert refusal.value.message.startswith(field)
    assert len(refusal.value.message) < 200


@pytest.mark.parametrize("first", GRAMMAR_KINDS)
def test_two_grammars_are_refused_and_both_named(first):
    second = next(kind for kind in GRAMMAR_KINDS if kind != first)
    values = {field: value for field, value, _ in reversed(TEXTS)}
    with pytest.raises(RequestError) as refusal:
        GrammarFields(**{first: values[first], second: values[second]}).grammar_spec()
    assert first in refusal.value.message
    assert second in refusal.value.message
    assert refusal.value.param in (first, second)


def of_size(field: str, num_bytes: int) -> object:
    """A grammar whose text has exactly so many bytes."""
    if field == "choice":
        return ["a" * (num_bytes - 4)]
    if field in ("json_schema", "structural_tag"):
        frame = {"json_schema": {"const": ""}, "structural_tag": {"type": "structural_tag", "format": ""}}[field]
        filled = dict(frame)
        last = list(frame)[-1]
        filled[last] = "a" * (num_bytes - len(json.dumps(frame, separators=(",", ":"))))
        return filled
    return "é" * (num_bytes // 2)


@pytest.mark.parametrize("field", GRAMMAR_KINDS)
def test_a_grammar_has_at_most_so_many_bytes(field):
    spec = GrammarFields(**{field: of_size(field, MAX_GRAMMAR_BYTES)}).grammar_spec()
    assert spec is not None
    assert len(spec.text.encode()) == MAX_GRAMMAR_BYTES
    with pytest.raises(
        RequestError, match=f"has {MAX_GRAMMAR_BYTES + 2} bytes.* at most {MAX_GRAMMAR_BYTES}"
    ) as refusal:
        GrammarFields(**{field: of_size(field, MAX_GRAMMAR_BYTES + 2)}).grammar_spec()
    assert refusal.value.param == field


def test_a_long_text_is_refused_before_it_is_decoded():
    text = " " * (MAX_GRAMMAR_BYTES + 1) + "{}"
    with pytest.raises(RequestError, match=f"has {len(text)} bytes"):
        GrammarFields(json_schema=text).grammar_spec()


def test_objects_can_be_written_as_json_and_mean_the_same():
    for field, value, text in TEXTS:
        given = GrammarFields(**{field: value})
        sent = given.with_json_as_text()
        assert sent.grammar_spec() == GrammarSpec(field, text, field)
        assert not isinstance(getattr(sent, field), dict)
    assert GrammarFields(json_schema={}, structural_tag={}).with_json_as_text().grammar_spec() is None
    with pytest.raises(RequestError, match="nested too deeply"):
        GrammarFields(json_schema=nested(3000)).with_json_as_text()
