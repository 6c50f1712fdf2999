"""`/v1/responses` over a scripted engine whose tokens are bytes."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import MODEL, Running, running_server
from openai.types.responses import Response
from responses_stream import events, folded, without_ids

from headrace.errors import ExecutionError
from headrace.messages.outputs import FinishReason

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Changes a file"}
SPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "files",
    "description": "Files of the user",
    "tools": [{"type": "function", "name": "read"}, {"type": "custom", "name": "write"}],
}
TOOLS = [WEATHER, PATCH, SPACE]
ASKED: dict[str, Any] = {"model": "", "input": "weather?", "tools": TOOLS, "max_output_tokens": 600}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"b\\" \\ud83d\\ude42 é"}}\n</tool_call>'
READ = '<tool_call>\n{"name": "files__read", "arguments": {}}\n</tool_call>'
PATCHED_TEXT = 'a\n"b" 🙂 é'


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running_server(fake_context_length=4096, enable_cache_report=True) as server:
        yield server


def prompt_of(server: Running) -> str:
    ids = server.frontend.calls[-1].input_ids
    assert ids is not None
    return server.frontend.tokenizer.decode(ids, False)


def refused(client: httpx.Client, param: str | None, **fields: Any) -> str:
    """The message of the 400 that names `param`."""
    reply = client.post(PATH, json={"model": "", "input": "a", "max_output_tokens": 4} | fields)
    assert reply.status_code in (400, 404), reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    message: str = error["message"]
    return message


def accepted(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = client.post(PATH, json={"model": "", "input": "a", "max_output_tokens": 4} | fields)
    assert reply.status_code == 200, reply.text
    response: dict[str, Any] = reply.json()
    return response


# -- output


def test_text_reasoning_and_calls_are_items(client: httpx.Client, server: Running):
    server.frontend.script.text = f"<think>hm</think>Let me see. {CALL}{PATCHED}{READ}"
    response = client.post(PATH, json=ASKED).json()
    Response.model_validate(response)
    thought, message, weather, patch, read = response["output"]
    assert (thought["type"], thought["summary"], thought["encrypted_content"]) == ("reasoning", [], None)
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]
    assert (weather["type"], weather["name"], weather["arguments"]) == (
        "function_call",
        "get_weather",
        '{"city": "Zürich"}',
    )
    assert "namespace" not in weather
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", PATCHED_TEXT)
    assert (read["name"], read["namespace"], read["arguments"]) == ("read", "files", "{}")
    ids = [item["id"] for item in response["output"]] + [item["call_id"] for item in (weather, patch, read)]
    assert len(set(ids)) == len(ids)
    assert response["status"] == "completed"
    assert response["model"] == MODEL
    made = len(server.frontend.script.text.encode())
    usage = response["usage"]
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (made, {"reasoning_tokens": 2})
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["total_tokens"] == usage["input_tokens"] + made


WORDS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    PATCHED,
    READ,
    '<tool_call>{"name": "patch", "arguments": {"other": 1}}</tool_call>',
    "\n",
    "a",
    "wörld 🙂",
    "{",
]


def random_text(chance: random.Random) -> str:
    text = "".join(chance.choices(WORDS, k=chance.randint(1, 8)))
    return text[: chance.randint(1, len(text))] if chance.random() < 0.3 else text


def test_any_stream_adds_up_to_the_whole_reply(client: httpx.Client, server: Running):
    kinds = set()
    for seed in range(200):
        chance = random.Random(seed)
        script = server.frontend.script
        script.text = random_text(chance)
        script.tokens_per_chunk = chance.choice([1, 1, 2, 7, 1000])
        body = ASKED | {"max_output_tokens": chance.choice([4, 600]), "tools": chance.choice([TOOLS, TOOLS, []])}
        if chance.random() < 0.3:
            body["include"] = ["message.output_text.logprobs"]
        whole = client.post(PATH, json=body).json()
        Response.model_validate(whole)
        streamed = folded(events(client.post(PATH, json=body | {"stream": True})))
        assert without_ids(streamed) == without_ids(whole), script.text
        kinds |= {item["type"] for item in whole["output"]} | {whole["status"]}
    assert kinds == {"message", "reasoning", "function_call", "custom_tool_call", "completed", "incomplete"}


def test_a_reply_that_is_cut_is_incomplete(client: httpx.Client, server: Running):
    server.frontend.script.text = "Hello"
    response = accepted(client, max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    last = events(client.post(PATH, json={"input": "a", "max_output_tokens": 3, "stream": True}))[-1]
    assert last["type"] == "response.incomplete"
    # More than the context has room for is lowered, so that clients with a fixed limit work.
    assert accepted(client, max_output_tokens=100_000)["max_output_tokens"] == 100_000
    assert server.frontend.resolved[-1].max_new_tokens < 4096


def test_errors_before_and_within_a_stream(client: httpx.Client, server: Running):
    script = server.frontend.script
    script.error, script.fail_at = ExecutionError("it broke"), 0
    assert client.post(PATH, json=ASKED | {"stream": True}).status_code == 500
    script.fail_at = 3
    found = events(client.post(PATH, json=ASKED | {"stream": True}))
    response = folded(found)
    assert (found[-1]["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": "server_error", "message": "it broke"}
    assert response["output"][0]["content"][0]["text"] == "Hel"
    assert response["output"][0]["status"] == "incomplete"
    script.error = None
    for finish, code in (
        (FinishReason("abort", message="no room", status_code=429), "rate_limit_exceeded"),
        (FinishReason("abort", message="bad grammar", status_code=400), "invalid_prompt"),
        (FinishReason("abort", message="asked for"), "server_error"),
    ):
        script.ends = {0: finish}
        found = events(client.post(PATH, json=ASKED | {"stream": True}))
        assert found[-1]["type"] == "response.failed"
        assert found[-1]["response"]["error"]["code"] == code
    script.ends = {0: FinishReason("abort", message="bad grammar", status_code=400, param="regex")}
    assert client.post(PATH, json=ASKED).status_code == 400


def test_a_client_that_leaves_ends_its_request(client: httpx.Client, server: Running):
    server.frontend.script.hold_at = 2
    with client.stream("POST", PATH, json=ASKED | {"stream": True}) as reply:
        next(reply.iter_lines())
    assert server.frontend.closed_early.wait(20)


def test_logprobs_belong_to_the_text(client: httpx.Client, server: Running):
    server.frontend.script.text = "ab"
    part = accepted(client, top_logprobs=2)["output"][0]["content"][0]
    assert [one["token"] for one in part["logprobs"]] == ["a", "b"]
    assert [len(one["top_logprobs"]) for one in part["logprobs"]] == [2, 2]
    part = accepted(client, include=["message.output_text.logprobs"])["output"][0]["content"][0]
    assert [one["top_logprobs"] for one in part["logprobs"]] == [[], []]
    refused(client, "top_logprobs", top_logprobs=21)
    server.frontend.script.text = f"<think>hm</think>ab{CALL}"
    thought, message, call = accepted(client, top_logprobs=1, tools=TOOLS, max_output_tokens=600)["output"]
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["a", "b"]
    assert "logprobs" not in json.dumps([thought, call])
    refused(client, "include", include=["everything"])


# -- input


def test_items_become_the_messages_of_a_chat(client: httpx.Client, server: Running):
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"role": "user", "content": "U"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "content": [{"type": "output_text", "text": "A", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'x"y'},
        {"type": "function_call", "call_id": "c3", "name": "read", "namespace": "files", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "of another server"},
        {"role": "user", "content": [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}]},
    ]
    accepted(client, input=items, instructions="I", tools=TOOLS)
    response_prompt = prompt_of(server)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
        {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": 'x"y'}},
        {"id": "c3", "type": "function", "function": {"name": "files__read", "arguments": "{}"}},
    ]
    messages = [
        {"role": "system", "content": "I\n\nD"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A", "reasoning_content": "R", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "1\n2"},
    ]
    nested = {"name": "files__read", "description": "Files of the user"}
    tools = [
        {"type": "function", "function": {name: WEATHER[name] for name in ("name", "description", "parameters")}},
        {"type": "custom", "custom": {"name": "patch", "description": "Changes a file"}},
        {"type": "function", "function": nested},
        {"type": "custom", "custom": {"name": "files__write"}},
    ]
    # The fake's template shows no empty tool message to chat; the text is the same.
    messages[5]["content"] = [{"type": "text", "text": ""}]
    reply = client.post("/v1/chat/completions", json={"messages": messages, "tools": tools, "max_tokens": 4})
    assert reply.status_code == 200, reply.text
    assert prompt_of(server) == response_prompt


def test_what_a_response_says_can_be_sent_back(client: httpx.Client, server: Running):
    server.frontend.script.text = f"<think>hm</think>Let me see. {CALL}{PATCHED}{READ}"
    first = client.post(PATH, json=ASKED).json()
    outputs = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "ok"}
        for item in first["output"]
        if "call_id" in item
    ]
    conversation = [{"role": "user", "content": "weather?"}, *first["output"], *outputs]
    server.frontend.script.text = "Fine."
    second = client.post(PATH, json=ASKED | {"input": conversation}).json()
    assert second["output"][0]["content"][0]["text"] == "Fine."
    prompt = prompt_of(server)
    assert "<|assistant|>Let me see.\n" in prompt
    assert prompt.count("<tool_response>\nok\n</tool_response>") == 3
    assert json.dumps({"input": PATCHED_TEXT}, ensure_ascii=False) in prompt


def test_a_tool_may_have_keys_of_the_client_s_own(client: httpx.Client, server: Running):
    labels = {"response": {"type": "object"}, "cache_control": {"type": "ephemeral"}, "surprise": 1}
    plain: list[dict[str, Any]] = [
        WEATHER,
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "files", "description": "", "tools": [{"type": "function", "name": "read"}]},
    ]
    accepted(client, tools=plain)
    prompt = prompt_of(server)
    plain[2]["tools"] = [tool | labels for tool in plain[2]["tools"]]
    accepted(client, tools=[tool | labels for tool in plain])
    assert prompt_of(server) == prompt


def test_tools_of_the_vendor_are_skipped_and_named(
    client: httpx.Client, server: Running, caplog: pytest.LogCaptureFixture
):
    tools = [{"type": "web_search", "search_context_size": "low"}, WEATHER, {"type": "mcp", "server_label": "x"}]
    reply = client.post(PATH, json=ASKED | {"tools": tools})
    assert reply.headers["x-headrace-skipped-tools"] == "web_search, mcp"
    assert [tool["name"] for tool in reply.json()["tools"]] == ["get_weather"]
    assert "web_search" not in prompt_of(server)
    reply = client.post(PATH, json=ASKED | {"tools": tools, "stream": True})
    assert reply.headers["x-headrace-skipped-tools"] == "web_search, mcp"
    reply = client.post(PATH, json=ASKED | {"tools": tools[:1]})
    assert (reply.status_code, reply.json()["tools"]) == (200, [])
    assert "x-headrace-skipped-tools" not in client.post(PATH, json=ASKED).headers
    refused(client, "tool_choice", tools=tools, tool_choice={"type": "web_search"})


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("auto", {"get_weather", "patch", "files__read"}),
        ("none", {"get_weather", "patch", "files__read"}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
            {"get_weather"},
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]}, {"patch"}),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "read"}]}, {"files__read"}),
    ],
)
def test_a_choice_says_what_the_model_sees(client: httpx.Client, server: Running, choice: Any, shown: set[str]):
    accepted(client, tools=TOOLS, tool_choice=choice)
    prompt = prompt_of(server)
    assert {name for name in ("get_weather", "patch", "files__read") if f'"{name}"' in prompt} == shown


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "custom", "name": "patch"},
        {"type": "function", "name": "read"},
    ],
)
def test_a_required_call_is_bound_by_a_grammar(client: httpx.Client, server: Running, choice: Any):
    accepted(client, tools=TOOLS, tool_choice=choice)
    assert server.frontend.resolved[-1].grammar is not None


def test_the_format_of_the_text(client: httpx.Client, server: Running):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    response = accepted(client, text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
    grammar = server.frontend.resolved[-1].grammar
    assert grammar is not None
    assert '"a"' in grammar.text
    assert response["text"]["format"]["schema"] == schema
    accepted(client, text={"format": {"type": "json_object"}})
    assert server.frontend.resolved[-1].grammar is not None
    accepted(client, text={"format": {"type": "text"}, "verbosity": "medium"})
    assert server.frontend.resolved[-1].grammar is None
    accepted(client, regex="[a-z]+")
    assert server.frontend.resolved[-1].grammar is not None
    message = refused(client, "text.format.schema", text={"format": {"type": "json_schema", "name": "x"}})
    assert message == "text.format.schema is missing"
    broken = {"type": "json_schema", "name": "x", "schema": {"type": "object", "a": "x" * (1 << 20)}}
    assert refused(client, "text.format", text={"format": broken}).startswith("text.format has ")
    refused(client, "text.format.schema", text={"format": {"type": "text", "schema": schema}})
    refused(client, "text.format", text={"format": {"type": "json_object"}}, regex="a")
    refused(client, "text.verbosity", text={"verbosity": 5})
    refused(client, "text.format.type", text={"format": {"type": "xml"}})


def test_sampling_parameters_reach_the_engine(client: httpx.Client, server: Running):
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["x"], "ignore_eos": True}
    accepted(
        client,
        **fields,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.5,
        cache_salt="s",
        data_parallel_rank=0,
    )
    found = server.frontend.resolved[-1]
    assert (found.temperature, found.top_p, found.top_k, found.min_p, found.seed) == (0.5, 0.25, 7, 0.1, 3)
    assert (found.stop, found.ignore_eos) == (("x",), True)
    assert (found.frequency_penalty, found.presence_penalty, found.repetition_penalty) == (0.5, 0.25, 1.5)
    call = server.frontend.calls[-1]
    assert (call.cache_salt, call.replica) == ("s", 0)
    refused(client, "priority", priority=2)
    refused(client, "temperature", temperature=-1)


def test_reasoning_effort_reaches_the_template(client: httpx.Client, server: Running):
    response = accepted(client, reasoning={"effort": "high", "summary": "auto"})
    assert prompt_of(server).endswith("[high]")
    assert response["reasoning"] == {"effort": "high", "summary": "auto"}


def test_what_asks_for_nothing_is_accepted(client: httpx.Client):
    fields: dict[str, Any] = {
        "background": False,
        "conversation": None,
        "prompt": None,
        "include": ["reasoning.encrypted_content", "web_search_call.results"],
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "in_memory",
        "client_metadata": {"originator": "x"},
        "service_tier": "auto",
        "store": False,
        "stream_options": {"include_obfuscation": False},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "reasoning": {"context": "auto", "generate_summary": None},
        "previous_response_id": None,
        "context_management": [],
        "instructions": None,
        "moderation": None,
        "parallel_tool_calls": True,
        "unheard_of": None,
    }
    response = accepted(client, **fields)
    for name in ("metadata", "user", "safety_identifier", "prompt_cache_key", "max_tool_calls", "store", "truncation"):
        assert response[name] == fields[name]
    for name, value in fields.items():
        accepted(client, **{name: value})
    assert accepted(client, max_tool_calls=0)["max_tool_calls"] == 0
    accepted(client, prompt_cache_retention="24h")
    assert accepted(client, store=True)["store"] is False, "the API's default, which routers spell out"
    stream = {"input": "a", "stream": True, "stream_options": {"include_obfuscation": True}, "max_output_tokens": 2}
    events(client.post(PATH, json=stream))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"service_tier": 5}, "service_tier"),
        ({"temperature": 2.5}, "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": -1}, "max_tool_calls"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"truncation": "half"}, "truncation"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"model": "other"}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"role": "", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["a"]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "surprise", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "summary": [], "content": [{"text": 5}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "namespace": 5}]}, "input[0].namespace"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "f", "input": 5}]}, "input[0].input"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}] * 2}, "input[1].call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "x" * 10_000}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        (
            {"tools": [{"type": "function", "name": "f", "allowed_callers": ["programmatic"]}]},
            "tools[0].allowed_callers",
        ),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [{"type": ["function"]}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": f"f{number}"} for number in range(2_000)]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": 5}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [5]}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        (
            {"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "peg"}}]},
            "tools[0].format.syntax",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client: httpx.Client, fields: dict[str, Any], param: str):
    refused(client, param, **fields)


def test_hostile_bodies_are_refused_or_answered(client: httpx.Client):
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    cyclic = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    bodies: list[bytes] = [
        json.dumps({"input": "a", "tools": [WEATHER | {"parameters": parameters}], "tool_choice": choice}).encode()
        for parameters in (deep, cyclic)
        for choice in ("auto", "required")
    ]
    bodies += [
        b'{"input": "\\ud800"}',
        b'{"input": "a", "tools": [{"type": "function", "name": "\\ud800"}]}',
        b'{"input": "a", "instructions": "\\udc00"}',
        b'{"input": [{"role": "user", "content": [{"type": "input_text", "text": "\\ud83d"}]}]}',
        b'{"input": "a", "metadata": {"a": 1}}',
        b'{"input": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"input": 1e999}',
        b"[]",
        b"",
    ]
    for body in bodies:
        reply = client.post(PATH, content=body, headers={"content-type": "application/json"})
        assert reply.status_code in (200, 400), (body[:200], reply.text)
        assert reply.status_code == 200 or set(reply.json()["error"]) == {"message", "type", "param", "code"}


JUNK: list[Any] = [
    None,
    0,
    -1,
    1e300,
    True,
    "",
    "x",
    "message",
    "custom",
    "\ud800",
    "\x00",
    [],
    {},
    [[]],
    [{}],
    {"type": []},
    "x" * 300,
]
WHOLE: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "read", "namespace": "files", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
    ],
    "tools": [
        *TOOLS,
        {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "max_output_tokens": 4,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything within a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


def test_a_body_with_anything_anywhere_is_no_fault_of_the_server(client: httpx.Client):
    every = list(places(WHOLE))
    seen = set()
    for seed in range(400):
        chance = random.Random(seed)
        body = json.loads(json.dumps(WHOLE))
        *path, last = chance.choice(every)
        place = body
        for key in path:
            place = place[key]
        if chance.random() < 0.2:
            del place[last]
        else:
            place[last] = chance.choice(JUNK)
        reply = client.post(PATH, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
        seen.add(reply.status_code)
        assert reply.status_code in (200, 400, 404), (body, reply.text)
    assert {200, 400} <= seen


def test_too_much_input_is_refused_or_shortened(client: httpx.Client, server: Running):
    items = [{"role": "system", "content": "S"}]
    for number in range(60):
        items += [{"role": "user", "content": f"<{number}>" + "x" * 100}]
    refused(client, "input", input=items)
    accepted(client, input=items, truncation="auto")
    prompt = prompt_of(server)
    assert prompt.startswith("<|system|>S\n<|user|>")
    assert "<59>" in prompt
    assert "<0>" not in prompt
    count = len(server.frontend.calls[-1].input_ids or [])
    one_more = count + len("<|user|><10>\n") + 100
    assert count <= 4096 - 4 < one_more, "no more is dropped than must be"
    short = [*items[:3]]
    accepted(client, input=short, truncation="auto")
    assert prompt_of(server).count("<|user|>") == 2
    refused(client, "input", input=[{"role": "user", "content": "x" * 5000}], truncation="auto")
    assert "items" in refused(client, "input", input=[{"role": "user", "content": "x"}] * 5000)


def test_results_go_with_their_calls_when_input_is_shortened(client: httpx.Client, server: Running):
    items: list[dict[str, Any]] = []
    for number in range(30):
        items.append({"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{number}", "output": "y" * 150})
    accepted(client, input=items, truncation="auto", max_output_tokens=100)
    prompt = prompt_of(server)
    assert 0 < prompt.count("<tool_call>") < 30
    assert prompt.count("<tool_call>") == prompt.count("<tool_response>")


def test_codex_is_understood(client: httpx.Client, server: Running):
    """The shape of what Codex CLI 0.169 sends."""
    text = [{"type": "input_text", "text": "x"}]
    body = {
        "model": MODEL,
        "instructions": "",
        "stream": True,
        "input": [
            {"type": "message", "role": role, "content": text} for role in ("developer", "developer", "user", "user")
        ],
        "tools": [
            WEATHER | {"strict": False},
            {"type": "namespace", "name": "multi_agent_v1", "description": "", "tools": [WEATHER]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a",
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    server.frontend.script.text = f"<think>hm</think>{CALL}"
    found = events(client.post(PATH, json=body))
    first = folded(found)
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    assert [call["name"] for call in calls] == ["get_weather"]
    output = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "sunny"}
    server.frontend.script.text = "It is sunny."
    again = body | {"input": [*body["input"], *first["output"], output]}  # type: ignore[misc]
    assert folded(events(client.post(PATH, json=again)))["output"][0]["content"][0]["text"] == "It is sunny."
