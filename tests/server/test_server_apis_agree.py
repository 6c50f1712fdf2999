"""One conversation through every chat API: the model is given the same prompt."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import Running, running_server

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": SCHEMA}
ARGUMENTS = '{"city": "Zürich"}'
CALL = {"name": "get_weather", "arguments": ARGUMENTS}

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": CALL}]},
            {"role": "tool", "tool_call_id": "a", "content": "sunny"},
            {"role": "user", "content": "thanks"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/responses": {
        "instructions": "S",
        "input": [
            {"type": "message", "role": "user", "content": "weather?"},
            {"type": "function_call", "call_id": "a", **CALL},
            {"type": "function_call_output", "call_id": "a", "output": "sunny"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "thanks"}]},
        ],
        "tools": [{"type": "function", **FUNCTION}],
    },
    "/v1/messages": {
        "model": "",
        "max_tokens": 100,
        "system": "S",
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Zürich"}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "sunny"},
                    {"type": "text", "text": "thanks"},
                ],
            },
        ],
        "tools": [
            {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": SCHEMA},
        ],
    },
    "/api/chat": {
        "stream": False,
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}],
            },
            {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
            {"role": "user", "content": "thanks"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running_server(fake_context_length=4096) as running:
        yield running


@pytest.mark.parametrize("tools", [True, False])
def test_the_prompt_is_the_same(server: Running, tools: bool):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        for path, body in REQUESTS.items():
            asked = {name: value for name, value in body.items() if tools or name != "tools"}
            reply = client.post(path, json=asked)
            assert reply.status_code == 200, (path, reply.text)
    prompts = [server.frontend.tokenizer.decode(call.input_ids or [], False) for call in server.frontend.calls]
    assert len(prompts) == len(REQUESTS)
    assert prompts[0].endswith("<|user|>thanks\n<|assistant|>")
    assert server.frontend.in_chats[-len(prompts) :] == [True] * len(prompts)  # the end of a turn ends them
    for path, prompt in zip(REQUESTS, prompts, strict=True):
        assert prompt == prompts[0], path
    server.frontend.calls.clear()


TYPICAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}]}, {"typical_p": 0.25}),
    "/v1/completions": ({"prompt": "a"}, {"typical_p": 0.25}),
    "/v1/responses": ({"input": "a"}, {"typical_p": 0.25}),
    "/generate": ({"text": "a"}, {"sampling_params": {"typical_p": 0.25}}),
    "/api/chat": ({"messages": [{"role": "user", "content": "a"}], "stream": False}, {"options": {"typical_p": 0.25}}),
    "/api/generate": ({"prompt": "a", "stream": False}, {"options": {"typical_p": 0.25}}),
}


@pytest.mark.parametrize("route", TYPICAL)
def test_typical_p_is_sampled_with_on_every_api_that_has_it(server: Running, route: str):
    body, asked = TYPICAL[route]
    with httpx.Client(base_url=server.url) as client:
        for more, want in ((asked, 0.25), ({}, 1.0)):
            server.frontend.resolved.clear()
            assert client.post(route, json=body | more).status_code == 200
            assert [one.typical_p for one in server.frontend.resolved] == [want]


OPTIONS = {"type": "object", "properties": {"a": {"oneOf": [{"pattern": "^x"}, {"pattern": "y$"}]}}}
LOOSE = {**OPTIONS, "x-guidance": {"coerce_one_of": True}}
EXACT = {**OPTIONS, "x-guidance": {"coerce_one_of": False}}


def _openai(schema: Any, strict: bool) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
    }


def _responses(schema: Any, strict: bool) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": strict}}}


@pytest.mark.parametrize(
    ("path", "fields", "read_as"),
    [
        ("/v1/chat/completions", _openai(OPTIONS, False), LOOSE),
        ("/v1/chat/completions", _openai(OPTIONS, True), OPTIONS),
        ("/v1/chat/completions", _openai(EXACT, False), EXACT),
        ("/v1/chat/completions", _openai(SCHEMA, False), SCHEMA),
        ("/v1/chat/completions", {"guided_json": json.dumps(OPTIONS)}, LOOSE),
        ("/v1/chat/completions", {"json_schema": OPTIONS}, LOOSE),
        ("/v1/responses", _responses(OPTIONS, False), LOOSE),
        ("/v1/responses", _responses(OPTIONS, True), OPTIONS),
        ("/v1/responses", {"json_schema": OPTIONS}, LOOSE),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": OPTIONS}}, LOOSE),
        ("/api/chat", {"format": OPTIONS}, LOOSE),
    ],
)
def test_one_of_is_any_of_where_it_must_be_unless_the_schema_is_strict(
    server: Running, path: str, fields: dict[str, Any], read_as: Any
):
    body = {name: value for name, value in REQUESTS[path].items() if name != "tools"}
    reply = httpx.post(f"{server.url}{path}", json=body | fields, timeout=20)
    server.frontend.calls.clear()
    assert reply.status_code == 200, reply.text
    grammar = server.frontend.resolved[-1].grammar
    assert grammar is not None
    asked = json.loads(grammar.text)
    assert read_as in (asked, *(part.get("json_schema") for part in _parts(asked)))


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(item)
