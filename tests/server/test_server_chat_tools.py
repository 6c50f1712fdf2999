"""Tools and reasoning in chat completions, over a scripted engine whose tokens are bytes."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import Running, events, running_server

from headrace.messages.outputs import FinishReason

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "a"}], "tools": [WEATHER]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TURN = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running_server(fake_context_length=4096) as server:
        yield server


def folded(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of one choice add up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for frame in frames:
        for choice in frame["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    assert call["function"]["arguments"] == ""
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                else:
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "arguments"),
    [
        ("Hello, wörld 🙂!", "Hello, wörld 🙂!", "", []),
        (CALL, "", "", ['{"city": "Zürich"}']),
        (f"Let me look. {CALL}", "Let me look.", "", ['{"city": "Zürich"}']),
        (f"{CALL}\n{CALL}", "", "", ['{"city": "Zürich"}'] * 2),
        (f"<think>hm 🙂</think>{CALL}", "", "hm 🙂", ['{"city": "Zürich"}']),
        ("<think>hm</think>yes <tool_cal", "yes <tool_cal", "hm", []),
    ],
)
def test_a_stream_adds_up_to_the_whole_reply(
    client: httpx.Client,
    server: Running,
    text: str,
    content: str,
    reasoning: str,
    arguments: list[str],
    tokens_per_chunk: int,
):
    server.frontend.script.text = text
    whole = client.post(CHAT, json=ASKED | {"max_tokens": 400}).json()["choices"][0]
    message = whole["message"]
    assert (message["content"] or "") == content
    assert (message["reasoning_content"] or "") == reasoning
    assert [call["function"]["arguments"] for call in message.get("tool_calls", ())] == arguments
    assert (message["content"] is None) == (not content and bool(arguments))
    server.frontend.script.tokens_per_chunk = tokens_per_chunk
    frames = events(client.post(CHAT, json=ASKED | {"max_tokens": 400, "stream": True}))
    assert folded(frames) == {
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"name": "get_weather", "arguments": one} for one in arguments],
    }
    reasons = [choice["finish_reason"] for frame in frames for choice in frame["choices"] if choice["finish_reason"]]
    assert reasons == [whole["finish_reason"]] == ["tool_calls" if arguments else "stop"]


def test_ids_of_calls_differ(client: httpx.Client, server: Running):
    server.frontend.script.text = CALL + CALL
    calls = client.post(CHAT, json=ASKED | {"max_tokens": 400}).json()["choices"][0]["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)


def test_reasoning_is_counted_and_shown_as_asked(client: httpx.Client, server: Running):
    server.frontend.script.text = "<think>abcd</think>yes"
    usage = client.post(CHAT, json=ASKED).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}
    frames = events(client.post(CHAT, json=ASKED | {"stream": True, "stream_options": {"include_usage": True}}))
    assert frames[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    message = client.post(CHAT, json=ASKED | {"include_reasoning": False}).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", None)
    message = client.post(CHAT, json=ASKED | {"separate_reasoning": False}).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("<think>abcd</think>yes", None)
    frames = events(client.post(CHAT, json=ASKED | {"stream": True, "stream_reasoning": False}))
    deltas = [choice["delta"] for frame in frames for choice in frame["choices"]]
    assert [delta["reasoning_content"] for delta in deltas if delta.get("reasoning_content")] == ["abcd"]


@pytest.mark.parametrize(("matched", "reason"), [("ZZ", "stop"), (2, "tool_calls")])
def test_a_call_that_a_stop_string_has_cut_is_not_to_be_run(
    client: httpx.Client, server: Running, matched: str | int, reason: str
):
    server.frontend.script.text = CALL[: CALL.index("rich")]
    server.frontend.script.ends = {0: FinishReason("stop", matched=matched)}
    choice = client.post(CHAT, json=ASKED | {"max_tokens": 400}).json()["choices"][0]
    assert choice["finish_reason"] == reason
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Zü'


@pytest.mark.parametrize("size", [1, 5, len("</tool_call>") - 1])
def test_a_mark_that_is_cut_off_is_not_shown(client: httpx.Client, server: Running, size: int):
    server.frontend.script.text = CALL.removesuffix("</tool_call>") + "</tool_call>"[:size]
    message = client.post(CHAT, json=ASKED | {"max_tokens": 400}).json()["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == (None, 1)


def test_without_tools_a_call_is_text(client: httpx.Client, server: Running):
    server.frontend.script.text = CALL
    reply = client.post(CHAT, json={"model": "", "messages": ASKED["messages"], "max_tokens": 400}).json()
    assert reply["choices"][0]["message"]["content"] == CALL
    assert "tool_calls" not in reply["choices"][0]["message"]


def prompt_of(server: Running) -> str:
    ids = server.frontend.calls[-1].input_ids
    assert ids is not None
    return server.frontend.tokenizer.decode(ids, False)


def test_a_template_without_tools_gets_them_as_text(client: httpx.Client, server: Running):
    small = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert (
        client.post(CHAT, json={"model": "", "messages": messages, "tools": [small], "max_tokens": 1}).status_code
        == 200
    ), "fits"
    prompt = prompt_of(server)
    assert prompt.startswith("<|system|>S\n\n")
    assert f"<tools>\n{json.dumps(small)}\n</tools>" in prompt, "as the client wrote it, in the order of its keys"
    assert client.post(CHAT, json={"model": "", "messages": TURN, "max_tokens": 1}).status_code == 200
    prompt = prompt_of(server)
    assert '<|assistant|><tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n' in prompt
    assert "<|user|><tool_response>\nsunny\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        ([TURN[0], TURN[1] | {"tool_calls": TURN[1]["tool_calls"] * 2}], "messages[1].tool_calls[1].id"),  # type: ignore[operator]
        ([TURN[0], TURN[1] | {"tool_calls": [{"id": "a", "function": {}}]}], "messages[1].tool_calls[0].function.name"),
        ([TURN[0], TURN[1] | {"tool_calls": [{"id": "a"}]}], "messages[1].tool_calls[0].function"),
        ([TURN[0], TURN[1] | {"tool_calls": [{"id": "a", "type": "magic"}]}], "messages[1].tool_calls[0].type"),
        ([TURN[0] | {"tool_call_id": "a"}], "messages[0].tool_call_id"),
    ],
)
def test_a_broken_history_is_refused_by_name(client: httpx.Client, turn: list[dict[str, Any]], param: str):
    reply = client.post(CHAT, json=ASKED | {"messages": turn, "max_tokens": 1})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_hostile_tools_are_refused(client: httpx.Client):
    def status(tools: object) -> int:
        return client.post(CHAT, json=ASKED | {"tools": tools, "max_tokens": 1}).status_code

    def named(name: object) -> list[object]:
        return [{"type": "function", "function": {"name": name}}]

    assert status(named("x" * 10_000)) == 400
    assert status([named(f"tool{number}")[0] for number in range(2_000)]) == 400
    for name in ("", None, 5, "a\nb", 'a"b', "<a>"):
        assert status(named(name)) == 400, name
    assert status("tools") == 400
    assert status([5]) == 400
    nested: dict[str, object] = {"type": "object"}
    for _ in range(200):
        nested = {"type": "object", "properties": {"a": nested}}
    assert status([{"type": "function", "function": {"name": "f", "parameters": nested}}]) in (200, 400)


WORDS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    "\n",
    " ",
    "a",
    "wörld 🙂",
    "<",
    "{",
    '{"name": "f"',
]


def random_text(chance: random.Random) -> str:
    """Marks, calls and text in any order, cut anywhere."""
    text = "".join(chance.choices(WORDS, k=chance.randint(1, 8)))
    return text[: chance.randint(1, len(text))] if chance.random() < 0.3 else text


def test_any_stream_adds_up_to_the_whole_reply(client: httpx.Client, server: Running):
    for seed in range(200):
        chance = random.Random(seed)
        script = server.frontend.script
        script.text = random_text(chance)
        script.tokens_per_chunk = chance.choice([1, 1, 2, 7, 1000])
        body = ASKED | {"max_tokens": chance.choice([4, 400]), "parallel_tool_calls": chance.random() < 0.8}
        whole = client.post(CHAT, json=body).json()
        frames = events(client.post(CHAT, json=body | {"stream": True, "stream_options": {"include_usage": True}}))
        choice = whole["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        expected = (message["content"] or "", message["reasoning_content"] or "", calls)
        found = folded(frames)
        assert (found["content"], found["reasoning_content"], found["tool_calls"]) == expected, script.text
        reasons = [one["finish_reason"] for frame in frames for one in frame["choices"] if one["finish_reason"]]
        assert reasons == [choice["finish_reason"]]
        assert frames[-1]["usage"] == whole["usage"]


OLD: dict[str, Any] = {
    "model": "",
    "messages": ASKED["messages"],
    "functions": [WEATHER["function"]],
    "max_tokens": 400,
}


@pytest.mark.parametrize(
    ("choice", "reason"), [(None, "function_call"), ("auto", "function_call"), ({"name": "get_weather"}, "stop")]
)
def test_a_function_call_of_the_time_before_tools(client: httpx.Client, server: Running, choice: object, reason: str):
    server.frontend.script.text = f"<think>hm</think>{CALL}"
    body = OLD if choice is None else OLD | {"function_call": choice}
    whole = client.post(CHAT, json=body).json()["choices"][0]
    called = {"name": "get_weather", "arguments": '{"city": "Z\u00fcrich"}'}
    message = whole["message"]
    assert (message["function_call"], message["content"], message["reasoning_content"]) == (called, None, "hm")
    assert "tool_calls" not in message
    assert whole["finish_reason"] == reason
    choices = [frame["choices"][0] for frame in events(client.post(CHAT, json=body | {"stream": True}))]
    pieces = [one["delta"]["function_call"] for one in choices if "function_call" in one["delta"]]
    assert pieces[0] == {"name": "get_weather", "arguments": ""}
    assert {name for piece in pieces[1:] for name in piece} == {"arguments"}
    assert "".join(piece["arguments"] for piece in pieces) == called["arguments"]
    assert choices[-1]["finish_reason"] == reason
    assert not any("tool_calls" in one["delta"] for one in choices)

    result = {"role": "function", "name": "get_weather", "content": "sunny"}
    assert client.post(CHAT, json=OLD | {"messages": [*ASKED["messages"], message, result]}).status_code == 200
    with_functions = prompt_of(server)
    turn = [
        message | {"function_call": None, "tool_calls": [{"id": "a", "function": called}]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    assert (
        client.post(CHAT, json=ASKED | {"messages": [*ASKED["messages"], *turn], "max_tokens": 400}).status_code == 200
    )
    assert with_functions == prompt_of(server)


def test_without_function_call_none_there_is_text(client: httpx.Client, server: Running):
    server.frontend.script.text = CALL
    message = client.post(CHAT, json=OLD | {"function_call": "none"}).json()["choices"][0]["message"]
    assert message["content"] == CALL
    assert "function_call" not in message


@pytest.mark.parametrize("text", ["yes", CALL, f"<think>hm</think>a{CALL}", "<think>hm"])
@pytest.mark.parametrize(
    "asked",
    [{}, {"functions": OLD["functions"], "tools": []}, {"logprobs": True}, {"include_reasoning": False}, {"n": 2}],
)
def test_every_delta_has_reasoning_content(client: httpx.Client, server: Running, text: str, asked: dict[str, Any]):
    server.frontend.script = type(server.frontend.script)(text=text, progress=((9, 4),))
    body = ASKED | {"max_tokens": 400, "stream": True, "return_progress": True} | asked
    deltas = [choice["delta"] for frame in events(client.post(CHAT, json=body)) for choice in frame["choices"]]
    assert all("reasoning_content" in delta for delta in deltas)
    custom = {"type": "custom", "custom": {"name": "get_weather"}}
    deltas = [
        one["delta"]
        for frame in events(client.post(CHAT, json=body | {"tools": [custom], "functions": []}))
        for one in frame["choices"]
    ]
    assert all("reasoning_content" in delta for delta in deltas)
