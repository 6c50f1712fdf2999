"""`/v1/responses` over a real server and the official OpenAI client."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import ResponseCustomToolCall, ResponseFunctionToolCall
from server_process import ServerProcess

MODEL = "smollm2"
ASKED: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You answer in one short sentence.",
    "input": "What is the capital of France, and which river flows through it?",
    "temperature": 0,
    "max_output_tokens": 24,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME: dict[str, Any] = {
    "type": "custom",
    "name": "set_clock",
    "description": "Sets the clock to a time",
    "format": {"type": "grammar", "syntax": "regex", "definition": '"[0-2][0-9]:[0-5][0-9]"'},
}
CALLED: dict[str, Any] = {**ASKED, "input": "What is the weather in Oslo?", "max_output_tokens": 200}


@pytest.fixture(scope="module")
def server(smollm2_server: ServerProcess) -> ServerProcess:
    return smollm2_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_response_is_the_chat_of_the_same_conversation(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": ASKED["instructions"]}, {"role": "user", "content": ASKED["input"]}],
        temperature=0,
        max_tokens=24,
    )

    assert "Paris" in response.output_text
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens


def test_a_stream_is_the_same_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    with client.responses.stream(**ASKED) as stream:
        events = list(stream)

    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output_text
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert last.response.status == whole.status
    counts: list[dict[str, Any]] = [
        response.usage.model_dump(exclude={"input_tokens_details": {"cached_tokens"}})  # the first may find less
        for response in (last.response, whole)
        if response.usage is not None
    ]
    assert len(counts) == 2
    assert counts[0] == counts[1]


class Answer(pydantic.BaseModel):
    city: Literal["Paris", "London"]
    big: bool


def test_a_response_is_parsed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(**{**ASKED, "max_output_tokens": 100}, text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)
    with client.responses.stream(**{**ASKED, "max_output_tokens": 100}, text_format=Answer) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed


def test_a_function_is_called_and_its_result_is_read(client: openai.OpenAI) -> None:
    first = client.responses.create(**CALLED, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    (call,) = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments)["city"] in ("Paris", "Oslo")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    kept = client.responses.create(
        **{**CALLED, "input": [output]}, previous_response_id=first.id, tools=[WEATHER], tool_choice="none"
    )
    question: Any = {"role": "user", "content": CALLED["input"]}
    sent: Any = [question, call.to_dict(), output]
    whole = client.responses.create(**{**CALLED, "input": sent}, tools=[WEATHER], tool_choice="none", store=False)

    assert kept.output_text == whole.output_text
    assert kept.usage is not None
    assert whole.usage is not None
    assert kept.usage.input_tokens == whole.usage.input_tokens
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    listed = client.responses.input_items.list(kept.id, order="asc").data
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_the_text_of_a_custom_tool_matches_its_regular_expression(client: openai.OpenAI) -> None:
    named: Any = {"type": "custom", "name": "set_clock"}
    fields: dict[str, Any] = {**CALLED, "tools": [TIME, WEATHER], "tool_choice": named, "parallel_tool_calls": False}
    (call,) = client.responses.create(**fields).output
    assert isinstance(call, ResponseCustomToolCall)
    assert re.fullmatch(TIME["format"]["definition"], call.input), call.input
    with client.responses.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input
    chat: Any = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What time is it?"}],
        tools=[{"type": "custom", "custom": {"name": "set_clock", "format": TIME["format"]}}],  # type: ignore[list-item, misc]
        tool_choice={"type": "custom", "custom": {"name": "set_clock"}},
        temperature=0,
        max_tokens=200,
    )
    (made,) = chat.choices[0].message.tool_calls
    assert re.fullmatch(TIME["format"]["definition"], made.custom.input), made.custom.input


def test_a_custom_tool_with_a_lark_definition_is_called(client: openai.OpenAI) -> None:
    form: dict[str, Any] = {"type": "grammar", "syntax": "lark", "definition": 'start: "2" (" + " /[0-9]/)?'}
    fields: dict[str, Any] = {"tools": [{"type": "custom", "name": "sum", "format": form}], "tool_choice": "required"}
    with client.responses.stream(**CALLED | fields, parallel_tool_calls=False) as stream:
        deltas = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
        (call,) = stream.get_final_response().output
    assert isinstance(call, ResponseCustomToolCall)
    assert "".join(deltas) == call.input


def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED, include=["message.output_text.logprobs"], top_logprobs=2)
    part: Any = response.output[0].content[0]  # type: ignore[union-attr, index]
    text = b"".join(bytes(one.bytes) for one in part.logprobs).decode()
    assert text.startswith(part.text)
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)


def test_a_client_that_leaves_stops_the_response(server: ServerProcess) -> None:
    aborted = server.wait_until_idle()["num_aborted"]
    body = {"input": "Tell a long story.", "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as reply:
        next(reply.iter_lines())

    state = server.wait_until_idle()
    assert state["num_aborted"] - aborted == 1
    assert state["pool"]["leased_tokens"] == 0
