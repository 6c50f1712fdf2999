"""Tools over a real server and the official OpenAI client, with a model that was not trained to call them: the grammar makes it."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import openai
import pytest
from server_process import ServerProcess

MODEL = "smollm2"
NUM_PROMPTS = 6

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SUM = {
    "type": "object",
    "properties": {
        "terms": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 1,
            "maxItems": 4,
        }
    },
    "required": ["terms"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "add_numbers": SUM}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": schema, "strict": True},
    }
    for name, schema in SCHEMAS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "add_numbers"}}
ANSWER: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"answer": {"enum": ["yes", "no"]}},
            "required": ["answer"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(smollm2_server: ServerProcess) -> ServerProcess:
    return smollm2_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def asked(number: int, **fields: Any) -> dict[str, Any]:
    chance = random.Random(number)
    city, count = chance.choice(["Paris", "Oslo", "Lima", "Kyoto"]), chance.randint(2, 99)
    text = chance.choice([f"What is the weather in {city}?", f"Add {count} and {count + 1}.", f"Is {count} prime?"])
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": 250, "seed": number} | fields


def check_calls(calls: Any) -> None:
    assert calls, "at least one"
    for call in calls:
        jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))
    assert len({call.id for call in calls}) == len(calls)


def test_a_required_call_matches_its_schema(client: openai.OpenAI):
    def one(number: int) -> Any:
        return client.chat.completions.create(
            **asked(number, tool_choice="required", parallel_tool_calls=False, temperature=1.0)
        ).choices[0]

    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(one, range(NUM_PROMPTS)))
    for choice in choices:
        assert choice.finish_reason == "tool_calls"
        assert len(choice.message.tool_calls) == 1
        check_calls(choice.message.tool_calls)
    assert len({choice.message.tool_calls[0].function.arguments for choice in choices}) > 3, "they are not all the same"


def test_a_stream_of_calls_is_the_whole_reply(client: openai.OpenAI):
    request = asked(3, tool_choice="required", parallel_tool_calls=False, temperature=0)
    whole = client.chat.completions.create(**request).choices[0]
    with client.chat.completions.stream(
        **{name: value for name, value in request.items() if name != "stream"}
    ) as stream:
        final = stream.get_final_completion().choices[0]
    assert whole.message.tool_calls is not None
    assert final.message.tool_calls is not None
    check_calls(whole.message.tool_calls)
    assert [call.function.arguments for call in final.message.tool_calls] == [
        call.function.arguments for call in whole.message.tool_calls
    ]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    assert (final.message.content or None, whole.message.content) == (None, None)


def test_a_named_function_is_called_once_and_stops(client: openai.OpenAI):
    choice = client.chat.completions.create(**asked(1, tool_choice=NAMED, temperature=1.0)).choices[0]
    assert choice.finish_reason == "stop"
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["add_numbers"]
    check_calls(choice.message.tool_calls)


def test_none_allows_no_call(client: openai.OpenAI):
    for number in range(2):
        choice = client.chat.completions.create(
            **asked(number, tool_choice="none", max_tokens=20, temperature=1.5)
        ).choices[0]
        assert not choice.message.tool_calls
        assert "<tool_call>" not in (choice.message.content or "")


def test_a_response_format_beside_tools_is_one_or_the_other(client: openai.OpenAI):
    for number in range(3):
        choice = client.chat.completions.create(
            **asked(number, response_format=ANSWER, temperature=1.0, parallel_tool_calls=False)
        ).choices[0]
        if choice.message.tool_calls:
            assert not choice.message.content
        else:
            assert json.loads(choice.message.content or "")["answer"] in ("yes", "no")


def test_the_prefix_of_tools_is_cached_and_results_go_on(client: openai.OpenAI):
    first = client.chat.completions.create(**asked(0, tool_choice="required", parallel_tool_calls=False, temperature=0))
    message = first.choices[0].message
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    turn = [
        *asked(0)["messages"],
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": '{"result": "sunny"}'},
    ]
    second = client.chat.completions.create(**asked(0, max_tokens=20, temperature=0) | {"messages": turn})
    assert second.choices[0].message.content
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_schema_that_cannot_be_followed_is_refused_with_its_place(client: openai.OpenAI):
    tool = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked(0) | {"tools": [{"type": "function", "function": tool}]})
    assert caught.value.param == "tools"
    assert "/nowhere" in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="ebnf"):
        client.chat.completions.create(**asked(0), extra_body={"ebnf": 'root ::= "a"'})
