"""JSON schemas through an engine: of the outputs that a model wants to write, just the valid ones can be written, whatever the schema.

HEADRACE_JSON_SCHEMA_SUITE: a checkout of json-schema-org/JSON-Schema-Test-Suite.
"""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from engines import running_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schemas import SCHEMAS

from headrace.api.engine import Engine
from headrace.errors import RequestError
from headrace.grammar.json_schema import FORMATS

MAX_ORDERS = 24
"""In which an instance's properties are tried."""


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[Engine]:
    with running_engine(tiny_model, custom_logit_processors="write=scripted_output:write") as engine:
        yield engine


def texts_of(value: Any) -> list[str]:
    """A value as JSON: in several orders of its properties, and numbers without a fraction of 0."""
    return [json.dumps(form, ensure_ascii=False) for form in itertools.islice(_forms(value), MAX_ORDERS)]


def _forms(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            parts = [list(itertools.islice(_forms(value[name]), 4)) for name in names]
            yield from (dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*parts))
    elif isinstance(value, list):
        parts = [list(itertools.islice(_forms(item), 4)) for item in value]
        yield from map(list, itertools.product(*parts))
    else:
        yield int(value) if isinstance(value, float) and value.is_integer() else value


def accepted(engine: Engine, tokenizer: Any, schema: Any, values: list[Any]) -> list[bool] | None:
    """Which of the values a model that wants to write them can write, in any of their texts; None if the schema is refused."""
    texts = [(i, text) for i, value in enumerate(values) for text in texts_of(value)]
    scripts = [tokenizer.encode(text, add_special_tokens=False) for _, text in texts]
    sampling = {"temperature": 0.0, "json_schema": json.dumps(schema)}
    params = [{**sampling, "max_new_tokens": len(text.encode()) + 1} for _, text in texts]
    try:
        answers = engine.generate(input_ids=scripts, sampling_params=params, custom_logit_processor="write")
    except RequestError:
        return None
    done = {
        i
        for (i, text), answer in zip(texts, answers, strict=True)
        if answer["text"] == text and answer["meta_info"]["finish_reason"]["type"] == "stop"
    }
    return [i in done for i in range(len(values))]


TAGGED = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
    "required": ["kind"],
    "additionalProperties": {"type": "string"},
    "oneOf": [
        {"properties": {"kind": {"const": "a"}}, "required": ["n"]},
        {"properties": {"kind": {"const": "b"}}, "not": {"required": ["n"]}},
    ],
}
CASES: list[tuple[Any, list[Any]]] = [
    (True, [None, {"a": [1, "x"]}, -2.5]),
    ({"type": "string", "pattern": '^[^"\\\\]{2,3}$'}, ["ab", "a", '""', "\\\\", "äöü", "a\nb", "four"]),
    ({"type": "number", "minimum": -1, "exclusiveMaximum": 2.5}, [-1, -1.5, 0, 2.25, 2.5, "0"]),
    ({"type": "integer", "multipleOf": 3}, [0, 3, 4, -9, 3.0]),
    ({"enum": [1, "é", None, {"a": [1]}]}, [1, 2, "é", "e", None, {"a": [1]}, {"a": []}]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "maxItems": 2}, [
        [], [None], [None, True], [True], [None, 1], [None, True, True],
    ]),
    (TAGGED, [
        {"kind": "a", "n": 1}, {"kind": "a"}, {"kind": "b"}, {"kind": "b", "n": 1}, {"kind": "b", "x": "y"}, {"kind": "b", "x": 1}, {"n": 1},
    ]),
    ({"type": "object", "patternProperties": {'^[^"]*$': {"type": "integer"}}, "additionalProperties": False}, [
        {}, {"a": 1}, {'a"': 1}, {"a": "x"}, {"\\\\": 1},
    ]),
    ({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}, [[], [[], [[]]], [1]]),
    ({"type": "string", "format": "date"}, ["2026-11-23", "2026-13-01", "x"]),
    ({"type": "object", "minProperties": 1, "properties": {"a": {"type": "null"}}, "required": ["a"]}, [{}, {"a": None}, {"b": None}]),
]  # fmt: skip
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "pet": {"$ref": "#/$defs/Animal<Dog>"}},
    "required": ["name"],
    "$defs": {"Animal<Dog>": {"properties": {"legs": {"type": "integer", "maximum": 2**64 - 1}}}},
}
BOB = {"name": "Bob", "pet": {"legs": 4}}
REFUSED: list[Any] = [False, {"uniqueItems": True}, {"minProperties": 2}, {"const": "\x00"}, {"contains": {"const": 1}}]


@pytest.mark.parametrize(("schema", "values"), CASES, ids=lambda part: json.dumps(part)[:60])
def test_just_the_valid_instances_can_be_written(engine, tokenizer, schema, values):
    oracle = jsonschema_rs.validator_for(schema, validate_formats=True)
    assert accepted(engine, tokenizer, schema, values) == [oracle.is_valid(value) for value in values]


def test_an_object_that_lists_properties_has_no_others(engine, tokenizer):
    values = [BOB, {"name": "Bob"}, {**BOB, "age": 4}, {"name": "Bob", "pet": {"legs": 4, "age": 4}}]

    assert accepted(engine, tokenizer, PERSON, values) == [True, True, False, False]
    assert accepted(engine, tokenizer, {**PERSON, "x-guidance": {"open_objects": True}}, values) == [True] * 4


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_a_schema_that_cannot_be_enforced_is_refused(engine, tokenizer, schema):
    assert accepted(engine, tokenizer, schema, [1]) is None
    with pytest.raises(RequestError) as refused:
        engine.generate("a", {"json_schema": json.dumps(schema)})
    assert refused.value.param == "json_schema"


folder = os.environ.get("HEADRACE_JSON_SCHEMA_SUITE")


@pytest.mark.skipif(not folder, reason="HEADRACE_JSON_SCHEMA_SUITE is not set")
def test_the_json_schema_suite_is_never_taken_wrongly(engine, tokenizer):
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for path in sorted(Path(str(folder), "tests", "draft2020-12").glob("*.json")):
        for case in json.loads(path.read_text()):
            tests = case["tests"]
            # The suite's objects are open, as JSON Schema says.
            options = {"x-guidance": {"open_objects": True}} if isinstance(case["schema"], dict) else {}
            schema = {**case["schema"], **options} if options else case["schema"]
            taken = accepted(engine, tokenizer, schema, [test["data"] for test in tests])
            counts["schemas refused" if taken is None else "schemas accepted"] += 1
            for test, was_taken in zip(tests, taken or (), strict=taken is not None):
                # A known format holds, where the suite takes every format for an annotation.
                is_format = isinstance(case["schema"], dict) and case["schema"].get("format") in FORMATS
                if was_taken == test["valid"] or (is_format and not was_taken):
                    counts["instances taken rightly"] += 1
                else:
                    wrong.append(f"{path.stem}: {case['description']}: {test['description']}: {was_taken}")
    print(dict(counts), f"wrong: {len(wrong)}")
    assert wrong == []
    assert counts["schemas accepted"] > 150


def test_what_is_sampled_at_random_is_valid(engine):
    num_valid = 0

    @settings(max_examples=40, derandomize=True, database=None)
    @given(schema=SCHEMAS, seed=st.integers(0, 2**31))
    def sample(schema: Any, seed: int) -> None:
        nonlocal num_valid
        params = {"temperature": 1.5, "seed": seed, "max_new_tokens": 60, "json_schema": json.dumps(schema), "n": 4}
        try:
            answers = engine.generate("JSON:", params)
        except RequestError:
            return
        ended = [answer["text"] for answer in answers if answer["meta_info"]["finish_reason"]["type"] == "stop"]
        for text in ended:
            jsonschema_rs.validator_for(schema).validate(json.loads(text))
        num_valid += len(ended)

    sample()
    assert num_valid > 40
