"""The calls of the Berkeley Function Calling Leaderboard, written in each format and read again."""

import importlib.util
import json
from functools import cache
from pathlib import Path

import jsonschema_rs
import pytest
from parser_harness import Output, make_format
from renderers import MARKS, RENDERERS

FOUND = importlib.util.find_spec("bfcl_eval")
FILES = ("simple_python", "multiple", "parallel", "parallel_multiple")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}

pytestmark = pytest.mark.skipif(FOUND is None, reason="bfcl-eval is not installed")


def as_json_schema(schema):
    """The leaderboard names types as Python does."""
    if isinstance(schema, list):
        return [as_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: as_json_schema(value) for key, value in schema.items() if key not in ("default", "description", "optional")
    }
    kind = schema.get("type")
    if isinstance(kind, str) and kind in TYPES:
        made["type"] = TYPES[kind]
        if made["type"] is None:
            del made["type"]
    return made


def first_answer(value):
    """The leaderboard lists what it accepts; within objects, too."""
    return (
        {key: first_answer(options[0]) if isinstance(options, list) else options for key, options in value.items()}
        if isinstance(value, dict)
        else value
    )


@cache
def samples():
    """(tools, calls) of each sample whose calls match their schemas."""
    data = Path(FOUND.submodule_search_locations[0], "data")
    found, num_all = [], 0
    for name in FILES:
        answers = (data / "possible_answer" / f"BFCL_v4_{name}.json").read_text().splitlines()
        for line, answer in zip((data / f"BFCL_v4_{name}.json").read_text().splitlines(), answers, strict=True):
            functions = json.loads(line)["function"]
            tools = [{"name": item["name"], "parameters": as_json_schema(item["parameters"])} for item in functions]
            schemas = {tool["name"]: tool["parameters"] for tool in tools}
            calls = []
            for call in json.loads(answer)["ground_truth"]:
                ((called, parameters),) = call.items()
                arguments = {key: first_answer(options[0]) for key, options in parameters.items() if options[0] != ""}
                calls.append((called, arguments))
            num_all += 1
            if all(
                called in schemas and jsonschema_rs.is_valid(schemas[called], arguments) for called, arguments in calls
            ):
                found.append((tools, calls))
    assert len(found) >= 0.8 * num_all, (len(found), num_all)
    return found


@pytest.mark.parametrize("name", RENDERERS)
def test_every_call_comes_back(name):
    format = make_format(name, None, MARKS.get(name, ()))
    for tools, calls in samples():
        output = Output(format, RENDERERS[name](calls), tools=tools)
        parsed = output.parse([output.pieces[at : at + 5] for at in range(0, len(output.pieces), 5)])
        assert parsed.decoded == calls
        assert parsed.content == ""
