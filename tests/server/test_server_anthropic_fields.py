"""Every field of Anthropic's API: honoured, accepted without effect, or refused by name; and bodies that are wrong."""

import json
from typing import Any

import httpx
import pytest
from anthropic_messages import COUNT, HI, MESSAGES, RESULT, TURN, USE, WEATHER

from headrace.server.anthropic.protocol import NO_EFFECT, MessagesRequest

HONOURED = {
    "max_tokens", "messages", "model", "output_config", "output_format", "stop_sequences", "stream", "system", "temperature",
    "thinking", "tool_choice", "tools", "top_k", "top_p",
}  # fmt: skip
ACCEPTED: dict[str, list[Any]] = {
    "cache_control": [{"type": "ephemeral", "ttl": "1h"}],
    "context_management": [
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
    ],
    "diagnostics": [{"previous_message_id": None}, {"previous_message_id": "msg_1"}],
    "metadata": [{"user_id": "u"}, {"user_id": None}],
    "mcp_servers": [[]],
    "service_tier": ["auto", "standard_only"],
    "speed": ["standard"],
    "thread": [{"type": "create"}],
    "user_profile_id": ["u"],
    "workspace_id": ["w"],
}
REFUSED: dict[str, Any] = {
    "billing_policy": {"type": "billing_policy", "bill_to": "self"},
    "compaction": {"type": "summarize"},
    "container": "c",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}]},
    "fallback_credit_token": "t",
    "fallbacks": "default",
    "inference_geo": "us",
    "mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}],
    "speed": "fast",
    "thread": {"type": "fork"},
}


def test_every_field_is_honoured_accepted_or_refused_by_name(client: httpx.Client):
    ours = {"rid", "priority", "cache_salt", "session_params"}
    assert set(MessagesRequest.__struct_fields__) == HONOURED | set(ACCEPTED) | set(REFUSED) | ours
    assert set(ACCEPTED) > NO_EFFECT
    for name, values in ACCEPTED.items():
        for value in [*values, None]:
            reply = client.post(MESSAGES, json=HI | {name: value})
            assert reply.status_code == 200, (name, value, reply.text)
    for name, value in REFUSED.items():
        reply = client.post(MESSAGES, json=HI | {name: value})
        assert reply.status_code == 400, name
        assert name in reply.json()["error"]["message"]
        assert client.post(MESSAGES, json=HI | {name: None}).status_code == 200, name
    for name in ("seed", "response_format", "unknown"):
        reply = client.post(MESSAGES, json=HI | {name: 5})
        assert (reply.status_code, name in reply.json()["error"]["message"]) == (400, True)


def test_a_thread_is_never_here_so_that_the_client_sends_all_messages_again(client: httpx.Client):
    """`beta.messages.tool_runner` of anthropic 2.14 goes on with a thread after each reply, and begins anew at this code."""
    reply = client.post(MESSAGES, json=HI | {"thread": {"type": "continue", "previous_message_id": "msg_1"}})
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "not_found_error"
    assert reply.json()["error"]["details"] == {"error_code": "thread_not_found"}
    for thread in (None, {}, {"type": "create"}):
        assert client.post(MESSAGES, json=HI | {"thread": thread}).status_code == 200
    for thread in ({"type": "fork"}, {"type": ["create"]}, {"a": 1}, "create", 5, ["create"]):
        reply = client.post(MESSAGES, json=HI | {"thread": thread})
        assert (reply.status_code, "thread" in reply.json()["error"]["message"]) == (400, True)
        assert "details" not in reply.json()["error"]


def test_beta_flags_are_ignored(client: httpx.Client):
    headers = {
        "anthropic-beta": "unknown-2030-01-01,interleaved-thinking-2025-05-14",
        "anthropic-version": "2023-06-01",
    }
    assert client.post(f"{MESSAGES}?beta=true", json=HI, headers=headers).status_code == 200


def said(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


def after_call(*content: Any) -> dict[str, Any]:
    return {"messages": [*TURN[:2], {"role": "user", "content": list(content)}]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


CYCLE = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": 5, "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "content"),
    (said("text"), "content"),
    (said({"type": {"type": "text"}}), "messages[0].content[0].type"),
    (said({"type": ["text"]}), "messages[0].content[0].type"),
    (said({"type": "text"}), "messages[0].content[0].text"),
    (said({"type": "text", "text": None}), "messages[0].content[0].text"),
    (said({"type": "text", "text": "a", "nobody_knows": 1}), "nobody_knows"),
    (said({"type": "text", "text": "a", "id": "x"}), "messages[0].content[0].id"),
    (said(IMAGE), "does not support images"),
    (said({"type": "document", "source": {"type": "url", "url": "x"}}), "messages[0].content[0].source"),
    (said({"type": "dossier"}), "'dossier'"),
    (said(USE), "messages[0].content[0]"),
    (said({"type": "thinking", "thinking": "T"}), "messages[0].content[0]"),
    (said(RESULT, role="assistant"), "messages[0].content[0]"),
    (said(IMAGE, role="system"), "messages[0].content[0]"),
    ({"messages": TURN[:2]}, "messages[1]"),
    (after_call({"type": "tool_result", "content": "x"}), "messages[2].content[0].tool_use_id"),
    (after_call(RESULT | {"content": [IMAGE]}), "does not support images"),
    (after_call(RESULT | {"content": {"type": "text"}}), "messages[2].content[0].content"),
    (after_call(RESULT | {"content": [{"type": "text"}]}), "messages[2].content[0].content[0].text"),
    (after_call(RESULT | {"is_error": "yes"}), "is_error"),
    ({"messages": [TURN[0], {"role": "assistant", "content": [USE, USE]}]}, "messages[1].content[1].id"),
    ({"messages": [TURN[0], {"role": "assistant", "content": [USE | {"id": None}]}]}, "messages[1].content[0].id"),
    (
        {"messages": [TURN[0], {"role": "assistant", "content": [USE | {"caller": {"type": "x"}}]}]},
        "messages[1].content[0].caller",
    ),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"tools": {}, "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [5]}, "tools"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": "x"}]}, "input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [WEATHER | {"name": "x" * 10_000}]}, "tools[0].name"),
    ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
    ({"tools": [WEATHER | {"name": f"f{number}"} for number in range(1500)]}, "tools"),
    ({"tools": [WEATHER | {"allowed_callers": ["code_execution_20250825"]}]}, "allowed_callers"),
    ({"tools": [WEATHER], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "sometimes"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "any", "name": "get_weather"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "much"}}, "thinking"),
    ({"output_config": {"effort": "huge"}}, "effort"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "task_budget"),
    ({"output_format": {"type": "json_schema"}}, "schema"),
    ({"output_format": {"type": "text", "schema": {}}}, "output_format"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits[0].keep"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"model": 5}, "model"),
    ({"service_tier": "priority"}, "service_tier"),
]


@pytest.mark.parametrize("route", [MESSAGES, COUNT])
def test_bad_input_is_refused_by_name(client: httpx.Client, route: str):
    without_effect = {"max_tokens", "temperature", "top_p", "top_k", "stop_sequences"}
    for fields, name in BAD:
        if route == COUNT and fields.keys() & without_effect:
            continue
        reply = client.post(route, json=HI | fields)
        assert reply.status_code == 400, (fields, reply.text)
        error = reply.json()
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert name in error["error"]["message"], (fields, error)


@pytest.mark.parametrize("stream", [False, True])
def test_hostile_bodies_never_break_the_server(client: httpx.Client, stream: bool):
    surrogate = json.dumps(HI | {"stream": stream}).replace("hi", "\\ud800")
    for text in (
        surrogate,
        json.dumps(HI | {"tools": [WEATHER | {"name": "x"}]}).replace('"x"', '"\\udfff"'),
        "[" * 100_000,
        json.dumps(HI)[:-1],
        "null",
        "",
    ):
        reply = client.post(MESSAGES, content=text, headers={"content-type": "application/json"})
        assert reply.status_code in (400, 413), text[:80]
        assert reply.json()["type"] == "error"
    for fields in (
        {"tools": [WEATHER | {"input_schema": CYCLE, "strict": True}]},
        {"tools": [WEATHER | {"input_schema": nested(300), "strict": True}]},
        {"output_format": {"type": "json_schema", "schema": CYCLE}},
        {"output_format": {"type": "json_schema", "schema": nested(300)}},
        {"tools": [WEATHER | {"name": f"f{number}"} for number in range(1000)]},
        {"messages": [{"role": "user", "content": "x"}] * 9000},
    ):
        reply = client.post(MESSAGES, json=HI | fields | {"stream": stream})
        assert reply.status_code in (200, 400, 413), (reply.status_code, reply.text[:200])
