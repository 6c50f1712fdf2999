"""/v1/messages, its token counts and models, over a scripted engine whose tokens are bytes."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic_messages import CALL, COUNT, HI, MESSAGES, RESULT, TURN, USE, WEATHER, events, folded
from fake_frontend import MODEL, Running, running_server

from headrace.errors import CapacityError, ExecutionError, RequestError
from headrace.messages.outputs import FinishReason


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running_server(fake_context_length=8192) as server:
        yield server


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": blocks}


def random_output(draw: random.Random) -> str:
    """An output as a model might write it, sometimes cut off."""
    texts = ["Hello, wörld 🙂!", " ", "\n\n", "a < b", "<tool_cal", "</think>", '{"a": 1}', "yes"]
    calls = [
        CALL,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "g", "arguments": {"a": [1, {"b": "\\"}"}], "c": null}}</tool_call>',
        '<tool_call>{"name": "h", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "broken", "arguments": {"a": 1</tool_call>',
    ]
    parts = [f"<think>{draw.choice(texts)}{draw.choice(texts)}</think>"] if draw.random() < 0.4 else []
    parts += [draw.choice(texts if draw.random() < 0.6 else calls) for _ in range(draw.randrange(5))]
    output = "".join(parts)
    return output[: draw.randrange(len(output) + 1)] if draw.random() < 0.3 else output


def test_a_stream_adds_up_to_the_whole_message(client: httpx.Client, server: Running):
    draw = random.Random(5)
    seen: set[str] = set()
    for _ in range(200):
        server.frontend.script.text = random_output(draw)
        body = HI | {"tools": [WEATHER]} | ({"max_tokens": draw.randrange(60)} if draw.random() < 0.3 else {})
        whole = client.post(MESSAGES, json=body).json()
        server.frontend.script.tokens_per_chunk = draw.choice([1, 2, 5, 1000])
        message = folded(events(client.post(MESSAGES, json=body | {"stream": True})))
        assert without_ids(message) == without_ids(whole), server.frontend.script.text
        seen.update(block["type"] for block in whole["content"])
        seen.add(whole["stop_reason"])
        assert len({block["id"] for block in whole["content"] if "id" in block}) == str(whole).count("'id': 'toolu_")
    assert seen == {"text", "thinking", "tool_use", "end_turn", "max_tokens"} | {"tool_use"}


def test_a_whole_message(client: httpx.Client, server: Running):
    server.frontend.script.text = f"<think>hm 🙂</think>Let me look. {CALL}"
    reply = client.post(MESSAGES, json=HI | {"tools": [WEATHER]})
    message = reply.json()
    thinking, text, use = message["content"]
    assert thinking == {"type": "thinking", "thinking": "hm 🙂", "signature": "headrace"}
    assert text == {"type": "text", "text": "Let me look."}
    assert use["id"].startswith("toolu_")
    assert use == {"type": "tool_use", "id": use["id"], "name": "get_weather", "input": {"city": "Zürich"}}
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(server.frontend.calls[-1].input_ids or ())
    assert usage["cache_read_input_tokens"] == server.frontend.script.cached_tokens
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == len(server.frontend.script.text.encode())
    assert usage["output_tokens_details"] == {"thinking_tokens": len("hm 🙂".encode())}
    assert reply.headers["request-id"] == reply.headers["x-request-id"] == message["id"]


def test_thinking_that_is_omitted_leaves_its_signature(client: httpx.Client, server: Running):
    server.frontend.script.text = "<think>secret</think>yes"
    body = HI | {"thinking": {"type": "adaptive", "display": "omitted"}}
    whole = client.post(MESSAGES, json=body).json()
    assert whole["content"] == [
        {"type": "thinking", "thinking": "", "signature": "headrace"},
        {"type": "text", "text": "yes"},
    ]
    reply = client.post(MESSAGES, json=body | {"stream": True})
    assert "secret" not in reply.text
    assert folded(events(reply))["content"] == whole["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (FinishReason("stop", matched=2), "end_turn", None),
        (FinishReason("stop", matched="END"), "stop_sequence", "END"),
        (FinishReason("length", length=3), "max_tokens", None),
    ],
)
def test_why_a_message_ended(
    client: httpx.Client, server: Running, finish: FinishReason, reason: str, sequence: str | None, stream: bool
):
    server.frontend.script.ends = {0: finish}
    reply = client.post(MESSAGES, json=HI | {"stop_sequences": ["END"], "stream": stream})
    message = folded(events(reply)) if stream else reply.json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert server.frontend.resolved[-1].stop == ("END",)


def test_failures_have_anthropics_form(client: httpx.Client, server: Running):
    script = server.frontend.script
    for error, status, kind in (
        (CapacityError("full"), 503, "overloaded_error"),
        (CapacityError("too often", status_code=429), 429, "rate_limit_error"),
        (ExecutionError("broke"), 500, "api_error"),
        (RequestError("no"), 400, "invalid_request_error"),
    ):
        script.error, script.fail_at = error, 0
        for stream in (False, True):
            reply = client.post(MESSAGES, json=HI | {"stream": stream})
            assert reply.status_code == status
            assert reply.json() == {"type": "error", "error": {"type": kind, "message": error.message}}
            assert reply.headers["request-id"]
        script.fail_at = 3
        stream_of = events(client.post(MESSAGES, json=HI | {"stream": True}))
        assert stream_of[0]["type"] == "message_start"
        assert stream_of[-1] == {"type": "error", "error": {"type": kind, "message": error.message}}
    reply = client.post(MESSAGES, json=HI | {"model": "claude"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    reply = client.get(MESSAGES)
    assert (reply.status_code, reply.json()["type"]) == (405, "error")


def test_an_aborted_message_is_an_error(client: httpx.Client, server: Running):
    server.frontend.script.ends = {0: FinishReason("abort", message="aborted")}
    assert client.post(MESSAGES, json=HI).status_code == 400
    assert events(client.post(MESSAGES, json=HI | {"stream": True}))[-1]["type"] == "error"


def test_keys_come_as_x_api_key_too():
    with running_server(api_key="secret") as server, httpx.Client(base_url=server.url) as client:
        reply = client.post(MESSAGES, json=HI)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert client.post(MESSAGES, json=HI, headers=headers).status_code == 200


# -- the conversation


def prompt_of(server: Running) -> str:
    ids = server.frontend.calls[-1].input_ids
    assert ids is not None
    return server.frontend.tokenizer.decode(ids, False)


def test_every_part_of_a_conversation_reaches_the_prompt(client: httpx.Client, server: Running):
    billing = "x-anthropic-billing-header: cc_version=2.1.330"
    body = HI | {
        "system": [
            {"type": "text", "text": billing, "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "S1"},
            {"type": "text", "text": "S2"},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "U1"}, {"type": "text", "text": "U2"}]},
            {"role": "system", "content": "S3"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "T", "signature": "headrace"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "A", "citations": None},
                    USE,
                    USE | {"id": "toolu_b", "input": {}, "caller": {"type": "direct"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "U3"},
                    RESULT,
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_b",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "luck"}],
                    },
                ],
            },
        ],
    }
    assert client.post(MESSAGES, json=body).status_code == 200
    assert prompt_of(server) == (
        "<|system|>S1\nS2\n<|user|>U1\nU2\n<|system|>S3\n"
        '<|assistant|>A\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>\n'
        "<|user|><tool_response>\nsunny\n</tool_response>\n<|user|><tool_response>\nError: no\nluck\n</tool_response>\n"
        "<|user|>U3\n<|assistant|>"
    )


def test_what_claude_code_sends_is_answered(client: httpx.Client, server: Running):
    """The shape of its requests, recorded from version 2.1.330, with fewer tools."""
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "say hello"} | marked]},
            {"role": "system", "content": "Today is Monday."},
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.b1; cc_entrypoint=cli;"},
            {"type": "text", "text": "You are Claude Code."} | marked,
            {"type": "text", "text": "Be short."} | marked,
        ],
        "tools": [
            WEATHER | {"eager_input_streaming": True},
            {
                "name": "DeferredToolPlaceholder",
                "description": "",
                "input_schema": {"type": "object"},
                "defer_loading": True,
            },
        ],
        "metadata": {"user_id": "user_0123"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,effort-2025-11-24",
        "x-api-key": "none",
        "x-stainless-retry-count": "0",
        "accept-encoding": "gzip, deflate, br, zstd",
    }
    server.frontend.script.text = CALL
    reply = client.post(f"{MESSAGES}?beta=true", json=body, headers=headers)
    message = folded(events(reply))
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert message["stop_reason"] == "tool_use"
    assert reply.headers["x-headrace-skipped-tools"] == "DeferredToolPlaceholder"
    assert prompt_of(server).startswith("<|system|>You are Claude Code.\nBe short.\n")


TEMPLATE_WITH_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content or '' }}:{{ m.content }}]{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is defined %}thinks={{ enable_thinking }}{% endif %}"
    "{% if reasoning_effort is defined %}effort={{ reasoning_effort }}{% endif %}"
)


def test_thinking_and_effort_reach_the_template():
    with (
        running_server(TEMPLATE_WITH_THOUGHTS, special_tokens=("<think>", "</think>")) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        for fields, want in (
            ({}, "thinks=False"),
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinks=True"),
            ({"thinking": {"type": "disabled"}}, "thinks=False"),
            ({"thinking": {"type": "adaptive", "display": "summarized"}}, ""),
            ({"output_config": {"effort": "high"}}, "thinks=Trueeffort=high"),
            ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "thinks=Trueeffort=max"),
            ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, "thinks=Falseeffort=low"),
        ):
            assert client.post(MESSAGES, json=HI | {"max_tokens": 9} | fields).status_code == 200
            assert prompt_of(server) == f"[user::hi]{want}"
        thought = {"type": "thinking", "thinking": "T", "signature": "s"}
        messages = [*HI["messages"], {"role": "assistant", "content": [thought, {"type": "text", "text": "A"}]}]
        body = HI | {"max_tokens": 9, "messages": [*messages, HI["messages"][0]], "thinking": {"type": "adaptive"}}
        assert client.post(MESSAGES, json=body).status_code == 200
        assert prompt_of(server) == "[user::hi][assistant:T:A][user::hi]"


def test_the_same_conversation_has_the_same_prompt_as_a_chat(client: httpx.Client, server: Running):
    body = {"system": "S", "messages": TURN, "tools": [WEATHER], "max_tokens": 9}
    assert client.post(MESSAGES, json=HI | body).status_code == 200
    function = {"name": "get_weather", "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    call = {"id": "toolu_a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    chat = {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "toolu_a", "content": "sunny"},
        ],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 9,
    }
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    message, completion = server.frontend.calls
    assert message.input_ids == completion.input_ids


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)


def test_a_late_system_message_is_the_users_where_the_template_takes_no_other():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "A"}]},
        {"role": "system", "content": "S2"},
        {"role": "assistant", "content": "B"},
        {"role": "system", "content": "S3"},
        {"role": "user", "content": "C"},
    ]
    with running_server(STRICT) as server, httpx.Client(base_url=server.url) as client:
        reply = client.post(MESSAGES, json=HI | {"max_tokens": 9, "system": "S1", "messages": messages})
        assert reply.status_code == 200, reply.text
        assert prompt_of(server) == "[system:S1][user:A\n\nS2][assistant:B][user:S3\n\nC]"
        reply = client.post(MESSAGES, json=HI | {"max_tokens": 9, "messages": [messages[2], messages[2], messages[3]]})
        assert reply.status_code == 400
        assert "alternate" in reply.json()["error"]["message"]


def test_the_last_assistant_message_is_continued(client: httpx.Client, server: Running):
    for content in ("Once upon", [{"type": "text", "text": "Once upon"}]):
        body = HI | {"messages": [*HI["messages"], {"role": "assistant", "content": content}]}
        assert client.post(MESSAGES, json=body).status_code == 200
        assert prompt_of(server) == "<|user|>hi\n<|assistant|>Once upon"


def test_tools_that_only_the_vendor_knows_are_skipped_and_said(client: httpx.Client, server: Running):
    tools = [
        WEATHER,
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"name": "Later", "input_schema": {"type": "object"}, "defer_loading": True},
        {"type": "mcp_toolset", "mcp_server_name": "x\r\ny"},
        {"type": "custom", "name": "own", "input_schema": {"type": "object"}},
    ]
    for stream in (False, True):
        reply = client.post(MESSAGES, json=HI | {"tools": tools, "stream": stream})
        assert reply.status_code == 200
        assert reply.headers["x-headrace-skipped-tools"] == "web_search, Later, mcp_toolset"
    prompt = prompt_of(server)
    assert '"name": "get_weather"' in prompt
    assert '"name": "own"' in prompt
    assert "Later" not in prompt
    assert "web_search" not in prompt
    reply = client.post(COUNT, json={"model": MODEL, "messages": HI["messages"], "tools": tools})
    assert reply.headers["x-headrace-skipped-tools"] == "web_search, Later, mcp_toolset"
    body = HI | {"tools": tools[1:2], "tool_choice": {"type": "tool", "name": "web_search"}}
    assert client.post(MESSAGES, json=body).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "S", "tools": [WEATHER]},
        {"messages": TURN, "tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        {"messages": [*HI["messages"], {"role": "assistant", "content": "Once"}]},
    ],
)
def test_counted_tokens_are_those_of_the_message(client: httpx.Client, server: Running, fields: dict[str, Any]):
    asked = {name: value for name, value in HI.items() if name != "max_tokens"} | fields
    counted = client.post(f"{COUNT}?beta=true", json=asked).json()
    whole = {"max_tokens": 5, "stream": True, "temperature": 0.5, "stop_sequences": ["x"], "metadata": {"user_id": "u"}}
    assert client.post(COUNT, json=asked | whole | {"thread": {"type": "create"}, "rid": "r"}).json() == counted
    first = events(client.post(f"{MESSAGES}?beta=true", json=HI | fields | {"stream": True}))[0]
    usage = first["message"]["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


# -- fields


def test_sampling_fields_reach_the_engine(client: httpx.Client, server: Running):
    body = HI | {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "stop_sequences": ["a", "b"], "max_tokens": 5}
    assert client.post(MESSAGES, json=body).status_code == 200
    found = server.frontend.resolved[-1]
    assert (found.temperature, found.top_k, found.top_p, found.stop, found.max_new_tokens) == (
        0.5,
        7,
        0.9,
        ("a", "b"),
        5,
    )


def test_max_tokens_is_lowered_to_the_room_in_the_context(client: httpx.Client, server: Running):
    assert client.post(MESSAGES, json=HI | {"max_tokens": 32_000}).status_code == 200
    assert server.frontend.resolved[-1].max_new_tokens == 8192 - len(server.frontend.calls[-1].input_ids or ())
    message = client.post(MESSAGES, json=HI | {"max_tokens": 0}).json()
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    reply = client.post(MESSAGES, json=HI | {"messages": [{"role": "user", "content": "x" * 3_000_000}]})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("prompt is too long: "), "what clients look for, to shorten it"


@pytest.mark.parametrize("schema", [{"type": "object", "properties": {"a": {"type": "integer"}}}, {}])
def test_an_output_format_is_a_grammar(client: httpx.Client, server: Running, schema: dict[str, Any]):
    wanted = {"type": "json_schema", "schema": schema}
    for fields in ({"output_format": wanted}, {"output_config": {"format": wanted}}):
        assert client.post(MESSAGES, json=HI | fields).status_code == 200
        grammar = server.frontend.resolved[-1].grammar
        assert grammar is not None
        assert f'"json_schema":{json.dumps(schema, separators=(",", ":"))}' in grammar.text
    both = {"output_format": wanted, "output_config": {"format": wanted}}
    assert client.post(MESSAGES, json=HI | both).status_code == 400


# -- models


def test_models_in_the_form_of_who_asks(client: httpx.Client, server: Running):
    version = {"anthropic-version": "2023-06-01"}
    server.frontend.adapters.names = ["pirate", "poet"]
    listed = client.get("/v1/models", headers=version).json()
    assert [model["id"] for model in listed["data"]] == [MODEL, "pirate", "poet"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, MODEL, "poet")
    page = client.get("/v1/models?limit=1", headers=version).json()
    assert ([model["id"] for model in page["data"]], page["has_more"]) == ([MODEL], True)
    page = client.get(f"/v1/models?limit=5&after_id={MODEL}", headers=version).json()
    assert ([model["id"] for model in page["data"]], page["has_more"]) == (["pirate", "poet"], False)
    page = client.get("/v1/models?limit=1&before_id=poet", headers=version).json()
    assert ([model["id"] for model in page["data"]], page["has_more"]) == (["pirate"], True)
    assert client.get(f"/v1/models/{MODEL}", headers=version).json()["type"] == "model"
    reply = client.get("/v1/models/claude", headers=version)
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    assert client.get("/v1/models").json()["object"] == "list"
    assert client.get(f"/v1/models/{MODEL}").json()["object"] == "model"
