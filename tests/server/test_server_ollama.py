"""Ollama's API over a scripted engine whose tokens are bytes."""

import json
import random
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from fake_frontend import MODEL, Running, running_server

from headrace.errors import ExecutionError
from headrace.messages.outputs import FinishReason
from headrace.sampling.params import SamplingParams
from headrace.server.ollama.models import human_number

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "a"}
ASKED: dict[str, Any] = {"model": MODEL, "messages": [USER]}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "a"}
GOOD = {CHAT: ASKED, GENERATE: PROMPT}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":\n "Zürich"}}\n</tool_call>'
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running_server(fake_context_length=4096) as server:
        yield server


def lines(reply: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream; checks its framing."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    rows = reply.text.split("\n")
    assert rows.pop() == ""
    return [json.loads(row) for row in rows]


def folded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The reply without a stream that the lines add up to, without times."""
    *parts, last = rows
    assert all(row["done"] is False and "done_reason" not in row for row in parts)
    whole = dict(last)
    for place in ("message", "response"):
        if place not in last:
            continue
        messages = [row[place] if place == "message" else row | {"content": row[place]} for row in rows]
        joined: dict[str, Any] = {"content": "".join(message["content"] for message in messages)}
        if thinking := "".join(message.get("thinking", "") for message in messages):
            joined["thinking"] = thinking
        if calls := [call for message in messages for call in message.get("tool_calls", ())]:
            joined["tool_calls"] = calls
        if place == "message":
            whole["message"] = {"role": "assistant"} | joined
        else:
            whole["response"] = joined.pop("content")
            whole |= joined
    if logprobs := [item for row in rows for item in row.get("logprobs", ())]:
        whole["logprobs"] = logprobs
    return without_times(whole)


def without_times(reply: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from run to run: times, and ids of calls."""
    for call in reply.get("message", reply).get("tool_calls", ()):
        call["id"] = ""
    return {name: value for name, value in reply.items() if name != "created_at" and "duration" not in name}


def refused(reply: httpx.Response, words: str = "", status: int = 400) -> None:
    """A refusal in Ollama's form that says `words`."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert list(body) == ["error"]
    assert words in body["error"]


def prompt_of(server: Running) -> str:
    ids = server.frontend.calls[-1].input_ids
    assert ids is not None
    return server.frontend.tokenizer.decode(ids, False)


def sampling_of(server: Running) -> SamplingParams:
    sampling = server.frontend.calls[-1].sampling_params
    assert isinstance(sampling, SamplingParams)
    return sampling


# -- replies


def test_a_chat_is_streamed_unless_the_client_says_otherwise(client: httpx.Client, server: Running):
    server.frontend.script.text = "Hello 🙂"
    rows = lines(client.post(CHAT, json=ASKED))
    texts = [row["message"]["content"] for row in rows]
    assert ("".join(texts), texts[:2], texts[-1]) == ("Hello 🙂", ["H", "e"], "")
    assert all(row["model"] == MODEL and row["message"]["role"] == "assistant" for row in rows)
    assert all(datetime.fromisoformat(row["created_at"]).tzinfo is not None for row in rows)
    assert rows[-1]["done"] is True
    assert rows[-1]["done_reason"] == "stop"
    assert all(type(rows[-1][name]) is int and rows[-1][name] >= 0 for name in COUNTS)
    assert rows[-1]["eval_count"] == 10
    assert rows[-1]["prompt_eval_count"] == len(server.frontend.calls[-1].input_ids or ())
    whole = client.post(CHAT, json=ASKED | {"stream": False}).json()
    assert without_times(whole) == folded(rows)
    assert all(type(whole[name]) is int for name in COUNTS)


def test_a_prompt_is_answered_in_response(client: httpx.Client, server: Running):
    server.frontend.script.text = "<think>hm</think>yes"
    rows = lines(client.post(GENERATE, json=PROMPT | {"system": "S"}))
    whole = client.post(GENERATE, json=PROMPT | {"system": "S", "stream": False}).json()
    assert (whole["response"], whole["thinking"], whole["done_reason"]) == ("yes", "hm", "stop")
    assert "message" not in whole
    assert without_times(whole) == folded(rows)
    assert prompt_of(server) == "<|system|>S\n<|user|>a\n<|assistant|>"


def test_a_raw_prompt_goes_to_the_model_as_it_is(client: httpx.Client, server: Running):
    server.frontend.script.text = "<think>hm</think>yes"
    body = PROMPT | {"prompt": "<|user|>a", "raw": True, "options": {"num_predict": 100_000}}
    whole = client.post(GENERATE, json=body | {"stream": False}).json()
    assert whole["response"] == "<think>hm</think>yes"
    assert "thinking" not in whole
    assert len(server.frontend.calls[-1].input_ids or ()) == 2, "a special token and a letter"
    refused(client.post(GENERATE, json=body | {"system": "S"}), "system")
    refused(client.post(GENERATE, json=body | {"think": True}), "think")


def test_a_model_without_a_template_completes_prompts():
    with running_server(template=None) as bare, httpx.Client(base_url=bare.url) as client:
        assert client.post(GENERATE, json=PROMPT | {"stream": False}).json()["done"] is True
        assert bare.frontend.calls[-1].input_ids == bare.frontend.tokenizer.encode("a")
        refused(client.post(GENERATE, json=PROMPT | {"system": "S"}), "chat template")
        refused(client.post(CHAT, json=ASKED), "chat template")
        assert client.post("/api/show", json={"model": MODEL}).json()["capabilities"] == ["completion"]


def test_the_limit_of_an_output_ends_it_with_length(client: httpx.Client, server: Running):
    for limit in (3, 100_000, -1, -2, 0):
        whole = client.post(CHAT, json=ASKED | {"stream": False, "options": {"num_predict": limit}}).json()
        assert whole["done_reason"] == ("length" if limit == 3 else "stop")
    assert client.post(CHAT, json=ASKED | {"stream": False, "options": {"num_predict": 3}}).json()["eval_count"] == 3


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_request_for_nothing_loads_or_unloads(client: httpx.Client, server: Running, path: str):
    for body, reason in (
        ({"model": MODEL}, "load"),
        ({"model": MODEL, "keep_alive": -1, "messages": [], "prompt": ""}, "load"),
        ({"model": MODEL, "keep_alive": 0}, "unload"),
        ({"model": MODEL, "keep_alive": "0s"}, "unload"),
    ):
        body = {name: value for name, value in body.items() if name != ("prompt" if path == CHAT else "messages")}
        reply = client.post(path, json=body).json()
        assert (reply["done"], reply["done_reason"]) == (True, reason)
        assert (reply["message"]["content"] if path == CHAT else reply["response"]) == ""
    assert server.frontend.calls == []


def test_logprobs_come_with_their_tokens(client: httpx.Client, server: Running):
    server.frontend.script.text = "<think>a</think>bc"
    body = ASKED | {"logprobs": True, "top_logprobs": 2}
    whole = client.post(CHAT, json=body | {"stream": False}).json()
    assert "".join(item["token"] for item in whole["logprobs"]) == "<think>a</think>bc"
    assert all(len(item["top_logprobs"]) == 2 and item["bytes"] for item in whole["logprobs"])
    assert folded(lines(client.post(CHAT, json=body))) == without_times(whole)
    plain = client.post(CHAT, json=ASKED | {"logprobs": True, "stream": False}).json()
    assert all("top_logprobs" not in item for item in plain["logprobs"])
    refused(client.post(CHAT, json=ASKED | {"top_logprobs": 2}), "top_logprobs")
    refused(client.post(CHAT, json=ASKED | {"logprobs": True, "top_logprobs": 21}), "top_logprobs")


def test_a_failure_before_the_first_line_is_a_status_and_a_later_one_a_line(client: httpx.Client, server: Running):
    for stream in (True, False):
        server.frontend.script.error, server.frontend.script.fail_at = ExecutionError("broken"), 0
        refused(client.post(CHAT, json=ASKED | {"stream": stream}), "broken", 500)
    server.frontend.script.fail_at = 3
    rows = lines(client.post(CHAT, json=ASKED))
    assert rows[-1] == {"error": "broken"}
    assert [row["done"] for row in rows[:-1]] == [False] * 3
    server.frontend.script.error = None
    server.frontend.script.ends = {0: FinishReason("abort", message="gone", status_code=500)}
    assert lines(client.post(CHAT, json=ASKED))[-1] == {"error": "gone"}
    refused(client.post(CHAT, json=ASKED | {"stream": False}), "gone", 500)


def test_a_client_that_leaves_ends_its_request(server: Running):
    server.frontend.script.hold_at = 3
    with httpx.Client(base_url=server.url) as client, client.stream("POST", CHAT, json=ASKED) as reply:
        next(reply.iter_lines())
    assert server.frontend.closed_early.wait(20)


# -- tools and reasoning


def test_calls_are_whole_and_their_arguments_objects(client: httpx.Client, server: Running):
    server.frontend.script.text = f"<think>hm</think>Let me look. {CALL}\n{CALL}"
    asked = ASKED | {"tools": [TOOL]}
    whole = client.post(CHAT, json=asked | {"stream": False}).json()
    message = whole["message"]
    assert (message["content"], message["thinking"], whole["done_reason"]) == ("Let me look.", "hm", "stop")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"index": index, "name": "get_weather", "arguments": {"city": "Zürich"}} for index in (0, 1)
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    rows = lines(client.post(CHAT, json=asked))
    assert [len(row["message"].get("tool_calls", ())) for row in rows if "tool_calls" in row["message"]] == [1, 1]
    assert folded(rows) == without_times(whole)


def test_a_call_that_is_cut_off_is_content(client: httpx.Client, server: Running):
    server.frontend.script.text = CALL
    body = ASKED | {"tools": [TOOL], "options": {"num_predict": 60}}
    whole = client.post(CHAT, json=body | {"stream": False}).json()
    assert whole["done_reason"] == "length"
    assert "tool_calls" not in whole["message"]
    assert whole["message"]["content"].startswith('get_weather {"city":')
    assert folded(lines(client.post(CHAT, json=body))) == without_times(whole)


def test_whole_replies_and_streams_agree_on_random_outputs(client: httpx.Client, server: Running):
    draw = random.Random(7)
    pieces = [CALL, "<think>", "</think>", "hm 🙂 ", "wörld", "\n", "<tool_call>", '{"name": "get_time"', "}", " "]
    for _ in range(200):
        server.frontend.script.text = "".join(draw.choices(pieces, k=draw.randint(1, 5)))
        server.frontend.script.tokens_per_chunk = draw.choice([1, 2, 5, 1000])
        body = draw.choice([ASKED, ASKED | {"tools": [TOOL, OTHER]}]) | {
            "options": {"num_predict": draw.randint(1, 200)}
        }
        whole = client.post(CHAT, json=body | {"stream": False}).json()
        assert folded(lines(client.post(CHAT, json=body))) == without_times(whole), server.frontend.script.text


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {}}} | more


@pytest.mark.parametrize("answer", [{}, {"content": None}, {"content": ""}, {"content": None, "thinking": "t"}])
def test_an_assistant_that_said_nothing_has_no_content(client: httpx.Client, server: Running, answer: dict[str, Any]):
    """Home Assistant keeps an empty answer in the history without its content."""
    turn = [USER, {"role": "assistant"} | answer, USER]
    assert client.post(CHAT, json=ASKED | {"messages": turn}).status_code == 200
    assert prompt_of(server) == "<|user|>a\n<|assistant|>\n<|user|>a\n<|assistant|>"


def test_a_tool_turn_without_ids_reaches_the_prompt(client: httpx.Client, server: Running):
    turn = [
        USER,
        {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [call("get_weather"), call("get_time")]},
        {"role": "tool", "content": "noon", "tool_name": "get_time"},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "", "tool_calls": [call("get_time")]},
        {"role": "tool", "content": "one", "tool_name": "get_time"},
    ]
    assert client.post(CHAT, json=ASKED | {"messages": turn}).status_code == 200
    prompt = prompt_of(server)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>' in prompt
    assert prompt.index("noon") < prompt.index("sunny") < prompt.index("one")
    named = [USER, {"role": "assistant", "tool_calls": [call("get_weather", id="x")]}]
    assert (
        client.post(CHAT, json=ASKED | {"messages": [*named, {"role": "tool", "content": "s", "tool_call_id": "x"}]})
    ).status_code == 200


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_a_message_without_content_is_empty(client: httpx.Client, server: Running, role: str):
    for content in ({}, {"content": None}, {"content": ""}, {"content": []}):
        reply = client.post(CHAT, json=ASKED | {"messages": [USER, {"role": role, **content}, USER]})
        assert reply.status_code == 200, reply.text


def test_a_result_without_any_call_is_a_message(client: httpx.Client, server: Running):
    """litellm's `ollama_chat` leaves the calls out of the history, and the names out of the results."""
    turn = [USER, {"role": "assistant", "content": ""}, {"role": "tool", "content": "sunny"}]
    assert client.post(CHAT, json=ASKED | {"messages": turn, "tools": [TOOL]}).status_code == 200
    assert "<tool_response>\nsunny\n</tool_response>" in prompt_of(server)


ASSISTANT = {"role": "assistant", "content": "", "tool_calls": [call("f", id="a")]}
RESULT = {"role": "tool", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "", "content": "a"}], "messages[0].role"),
        ([USER | {"images": ["aGk="]}], "does not support images"),
        ([USER | {"images": [5]}], "messages[0].images[0]"),
        ([USER | {"thinking": "t"}], "messages[0].thinking"),
        ([USER | {"tool_calls": [call("f")]}], "messages[0].tool_calls"),
        ([USER, ASSISTANT | {"tool_calls": [call("f", id="a")] * 2}], "messages[1].tool_calls[1].id"),
        ([USER, ASSISTANT | {"tool_calls": [call("")]}], "messages[1].tool_calls"),
        ("hi", "messages"),
        ([5], "messages"),
        ([USER] * 5000, "5000 messages"),
    ],
)
def test_broken_conversations_are_refused(client: httpx.Client, messages: Any, words: str):
    for stream in (True, False):
        refused(client.post(CHAT, json=ASKED | {"messages": messages, "stream": stream}), words)


def test_hostile_tools_are_refused(client: httpx.Client):
    def named(name: object) -> dict[str, object]:
        return {"type": "function", "function": {"name": name}}

    for tools in (
        [named("x" * 10_000)], [named(f"tool{number}") for number in range(2_000)], [TOOL, TOOL], "tools", [5], [{}],
        *([named(name)] for name in ("", None, 5, "a\nb", "<a>")), [{"type": "web_search"}],
        [{"type": "function", "function": {"name": "f", "parameters": [1]}}],
    ):  # fmt: skip
        refused(client.post(CHAT, json=ASKED | {"tools": tools}))
    nested: dict[str, object] = {"type": "object"}
    for _ in range(200):
        nested = {"type": "object", "properties": {"a": nested}}
    cyclic = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    for schema in (nested, cyclic):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert client.post(CHAT, json=ASKED | {"tools": [tool]}).status_code in (200, 400)
    many = [named(f"t{number}") for number in range(1_000)]
    refused(client.post(CHAT, json=ASKED | {"tools": many}), "context length")


def test_bodies_that_are_no_object_are_refused(client: httpx.Client):
    for path in (CHAT, GENERATE, "/api/show", "/api/pull"):
        for content in (
            b"",
            b"{",
            b"[]",
            b"null",
            b'{"model": "\\ud800"}',
            b'{"model": "\xff"}',
            b"[" * 9999,
            b'{"model": 5}',
        ):
            refused(client.post(path, content=content))


def test_a_body_needs_no_content_type(client: httpx.Client):
    """The examples of Ollama's documentation are curl commands without one."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    content = json.dumps(ASKED).encode()
    assert client.post(CHAT, content=content, headers=form).status_code == 200
    assert client.post(CHAT, content=content).status_code == 200


def test_think_is_passed_to_the_template_or_refused():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}[{{ enable_thinking }}|{{ reasoning_effort }}]"
    with running_server(template=template) as server, httpx.Client(base_url=server.url) as client:
        for think, shown in (
            (True, "[True|]"),
            (False, "[False|]"),
            ("high", "[True|high]"),
            (None, "[|]"),
            ("", "[|]"),
        ):
            assert client.post(CHAT, json=ASKED | {"think": think}).status_code == 200
            assert prompt_of(server).endswith(shown)
        refused(client.post(CHAT, json=ASKED | {"think": "most"}), "think")
        refused(client.post(CHAT, json=ASKED | {"think": 1}), "think")


# -- fields


def test_the_format_binds_the_output(client: httpx.Client, server: Running):
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
    for path in GOOD:
        for asked, want in (("json", {"type": "object"}), (schema, schema), ("", None), (None, None), ({}, None)):
            assert (
                client.post(
                    path, json=GOOD[path] | {"format": asked} | ({"raw": True} if path == GENERATE else {})
                ).status_code
                == 200
            )
            sampling = sampling_of(server)
            if path == GENERATE:
                assert sampling.json_schema == want
            elif want is None:
                assert sampling.structural_tag is None
            else:  # the model may reason before
                assert json.dumps(want) in str(sampling.structural_tag)
        refused(client.post(path, json=GOOD[path] | {"format": "yaml"}), "format")
        refused(client.post(path, json=GOOD[path] | {"format": 5}), "format")


def test_options_are_sampling_parameters(client: httpx.Client, server: Running):
    options = {
        "seed": 5, "stop": ["x"], "temperature": 0.5, "top_k": 3, "top_p": 0.4, "min_p": 0.1, "repeat_penalty": 1.5,
        "presence_penalty": 0.25, "frequency_penalty": 0.5, "num_predict": 7, "repeat_last_n": -1, "typical_p": 0.75,
    }  # fmt: skip
    for path in GOOD:
        assert client.post(path, json=GOOD[path] | {"options": options}).status_code == 200
        sampling = sampling_of(server)
        assert (sampling.seed, sampling.stop, sampling.temperature) == (5, ["x"], 0.5)
        assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p) == (3, 0.4, 0.1, 0.75)
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.25, 0.5)
        assert sampling.max_new_tokens == 7
    assert client.post(CHAT, json=ASKED | {"options": options | {"repeat_last_n": 0}}).status_code == 200
    sampling = sampling_of(server)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)


def test_without_options_the_model_s_values_hold_and_then_ollama_s(client: httpx.Client, server: Running):
    assert client.post(CHAT, json=ASKED).status_code == 200
    sampling = sampling_of(server)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 40, 0.9), "the model brings a temperature"
    assert (sampling.repetition_penalty, sampling.max_new_tokens, sampling.seed) == (None, None, None)


ACCEPTED: list[dict[str, Any]] = [
    {"num_ctx": 4096}, {"num_ctx": 1}, {"num_gpu": 99}, {"num_gpu": 0}, {"num_thread": 8}, {"num_batch": 512}, {"main_gpu": 1},
    {"use_mmap": True}, {"use_mmap": False}, {"use_mlock": True}, {"numa": True}, {"low_vram": True}, {"f16_kv": True},
    {"logits_all": True}, {"num_keep": 24}, {"seed": -1}, {"typical_p": 1.0}, {"tfs_z": 1}, {"mirostat": 0}, {"mirostat": 0.0},
    {"mirostat_tau": 5.0, "mirostat_eta": 0.1}, {"penalize_newline": False}, {"penalize_newline": True, "repeat_penalty": 1.1},
    {"repeat_last_n": 64, "repeat_penalty": 1.1}, {"repeat_last_n": 33}, {"repeat_last_n": 33, "repeat_penalty": 1},
    {"vocab_only": False}, {"embedding_only": None}, {"stop": "x"}, {"stop": []}, {"nobody_knows_this": None}, {}, {"top_k": 0},
    *({"repeat_last_n": count, "repeat_penalty": 1.1} for count in (65, 64.0, 256, 100_000)),
    {"num_gqa": 8}, {"rope_frequency_base": 0}, {"rope_frequency_scale": 1.0},
]  # fmt: skip
REFUSED: list[dict[str, Any]] = [
    {"num_ctx": "4097"}, {"typical_p": 0}, {"typical_p": 1.5}, {"mirostat": 1}, {"mirostat": 2.0},
    {"repeat_last_n": 63, "repeat_penalty": 1.1}, {"repeat_last_n": -2, "repeat_penalty": 1.1},
    {"penalize_newline": False, "presence_penalty": 1.0}, {"vocab_only": True}, {"embedding_only": True}, {"num_predict": -3},
    {"repeat_penalty": 3.0}, {"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"min_p": 2}, {"seed": -2}, {"stop": ["a"] * 99},
    {"temperature": "hot"}, {"num_predict": 1.5}, {"presence_penalty": 3},
    {"rope_frequency_base": 10000.0}, {"rope_frequency_scale": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_options_that_ask_for_nothing_and_those_that_ask_for_too_much(client: httpx.Client, path: str):
    for options in ACCEPTED:
        reply = client.post(path, json=GOOD[path] | {"options": options})
        assert reply.status_code == 200, (options, reply.text)
    for options in REFUSED:
        refused(client.post(path, json=GOOD[path] | {"options": options}), next(iter(options)))
    refused(client.post(path, json=GOOD[path] | {"options": 5}), "options")


def test_other_fields(client: httpx.Client):
    for path in GOOD:
        for name, values in {
            "keep_alive": (5, -1, "5m", "1h30m", "-1s", "0", None, 1.5, ""),
            "truncate": (True, False, None),
            "shift": (True, False, None),
            "think": (None, False),
            "model": (MODEL, f"{MODEL}:latest", "", "default", "default:latest"),
        }.items():
            for value in values:
                reply = client.post(path, json=GOOD[path] | {name: value})
                assert reply.status_code == 200, (name, value, reply.text)
        for name, wrong in {"keep_alive": "soon", "shift": 1, "stream": "yes"}.items():
            refused(client.post(path, json=GOOD[path] | {name: wrong}), name)
        refused(client.post(path, json=GOOD[path] | {"model": "other:latest"}), "other", 404)
        refused(client.post(path, json=GOOD[path] | {"model": f"{MODEL}:8b"}), "8b", 404)
    empty = {"system": "", "template": "", "suffix": "", "context": [], "images": [], "raw": False, "width": 0}
    assert client.post(GENERATE, json=PROMPT | empty).status_code == 200
    for name, value in {
        "template": "x",
        "context": [1],
        "images": ["a"],
        "width": 5,
        "steps": 5,
    }.items():
        refused(client.post(GENERATE, json=PROMPT | {name: value}), name)


NOTED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.7, "max_output_tokens": 256}, "temperature, max_output_tokens"),
    ({"options": {"reasoning_effort": "low"}}, "options.reasoning_effort"),
    ({"options": {"logit_bias": {"5": 1}, "useMLock": True}}, "options.logit_bias, options.useMLock"),
    (
        {"options": {"draft_num_predict": 4, "tfs_z": 0.5, "temperature": 0.5}},
        "options.draft_num_predict, options.tfs_z",
    ),
    ({"top_p": 2, "options": {"nobody_knows_this": [1]}}, "top_p, options.nobody_knows_this"),
    ({"nobody": {"options": {"x": 1}}}, "nobody"),
    ({"options": {"num_ctx": 32768}}, "options.num_ctx=4096"),
    ({"options": {"num_ctx": 131072.0, "xtc_probability": 0.5}}, "options.xtc_probability, options.num_ctx=4096"),
    ({"options": {"num_ctx": 4096}}, ""),
    ({"nobody": None, "options": {"nobody": False, "tfs_z": 1.0}}, ""),
    ({"ü\n" * 200: 1}, "?" * 100),
]


@pytest.mark.parametrize(("fields", "noted"), NOTED)
def test_what_nobody_knows_is_ignored_and_noted(
    client: httpx.Client, server: Running, fields: dict[str, Any], noted: str
):
    for path in GOOD:
        for stream in (True, False):
            plain = client.post(path, json=GOOD[path] | {"stream": stream})
            reply = client.post(path, json=GOOD[path] | {"stream": stream} | fields)
            assert reply.status_code == 200, reply.text
            assert reply.headers.get("x-headrace-noted", "") == noted
            assert folded(lines(reply)) == folded(lines(plain)) if stream else reply.json()["done"]
    for path in ("/api/show", "/api/pull"):
        about_options = "num_ctx" in str(fields) and path == "/api/show"
        reply = client.post(path, json={"model": MODEL} | fields)
        assert reply.status_code == 200, reply.text
        assert about_options or bool(reply.headers.get("x-headrace-noted")) == bool(noted or "options" in fields)


def test_a_limit_that_is_lowered_is_noted(client: httpx.Client):
    for path, more in ((CHAT, {}), (GENERATE, {}), (GENERATE, {"raw": True})):
        for stream in (True, False):
            body = GOOD[path] | more | {"stream": stream, "options": {"num_predict": 100_000, "num_ctx": 8192}}
            noted = client.post(path, json=body).headers["x-headrace-noted"]
            assert re.fullmatch(r"options\.num_ctx=4096, options\.num_predict=40\d\d", noted), noted


def test_what_is_ignored_is_logged_once(caplog: pytest.LogCaptureFixture):
    with running_server() as server, httpx.Client(base_url=server.url) as client, caplog.at_level("INFO"):
        for options in ({"useMLock": True}, {"useMLock": False}, {"useMLock": True, "useMmap": True}):
            for path in GOOD:
                assert client.post(path, json=GOOD[path] | {"options": options}).status_code == 200
    said = [
        record.getMessage().rpartition(": ")[2]
        for record in caplog.records
        if "x-headrace-noted" in record.getMessage()
    ]
    assert said == ["options.useMLock", "options.useMmap"]


def test_many_unknown_fields_are_read_in_one_pass(client: httpx.Client):
    options = {f"unknown_{number}": number for number in range(2_000)}
    reply = client.post(CHAT, json=ASKED | {"options": options | {"temperature": 0.5}})
    assert reply.status_code == 200
    assert len(reply.headers["x-headrace-noted"]) <= 1000
    refused(client.post(CHAT, json=ASKED | {"options": options | {"temperature": "hot"}}), "options.temperature")


def test_a_prompt_that_is_too_long_is_refused(client: httpx.Client):
    for raw in (False, True):
        refused(client.post(GENERATE, json=PROMPT | {"prompt": "a" * 5000, "raw": raw}))


def test_an_adapter_is_a_model(client: httpx.Client, server: Running):
    server.frontend.adapters.names.append("tuned")
    for name in ("tuned", "tuned:latest"):
        reply = client.post(CHAT, json=ASKED | {"model": name, "stream": False})
        assert reply.json()["model"] == name
        assert server.frontend.calls[-1].lora_path == "tuned"
    cards = client.get("/api/tags").json()["models"]
    assert [(card["name"], card["details"]["parent_model"]) for card in cards] == [
        (f"{MODEL}:latest", ""),
        ("tuned:latest", f"{MODEL}:latest"),
    ]


# -- models


def test_what_is_served(client: httpx.Client):
    (card,) = client.get("/api/tags").json()["models"]
    assert card["name"] == card["model"] == f"{MODEL}:latest"
    assert datetime.fromisoformat(card["modified_at"]).year == 1970
    (loaded,) = client.get("/api/ps").json()["models"]
    assert loaded["digest"] == card["digest"]
    assert loaded["context_length"] == 4096
    assert datetime.fromisoformat(loaded["expires_at"]).year > 2100
    assert all(part.isdigit() for part in client.get("/api/version").json()["version"].split("."))
    for body in ({"model": MODEL}, {"name": f"{MODEL}:latest", "verbose": True}):
        shown = client.post("/api/show", json=body).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == 4096
        assert shown["parameters"] == "temperature 0.25"
        for details in (card["details"], loaded["details"], shown["details"]):
            assert (details["format"], details["parameter_size"]) == ("gguf", "134.52M")
            assert (details["quantization_level"], details["family"]) == ("Q4_K_M", "fake")
        assert shown["model_info"]["general.parameter_count"] == 134_515_008
    refused(client.post("/api/show", json={"model": "other"}), "other", 404)
    refused(client.post("/api/show", json={}), "model")


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, ""),
        (512, "512"),
        (22_713_216, "22.71M"),
        (494_032_768, "494.03M"),
        (1_000_000, "1M"),
        (1_235_814_400, "1.2B"),
        (8 * 10**9, "8B"),
    ],
)
def test_numbers_of_parameters_look_as_ollamas(count: int, shown: str):
    assert human_number(count) == shown


def test_a_pull_succeeds_for_what_is_there(client: httpx.Client):
    assert client.post("/api/pull", json={"model": MODEL, "stream": False}).json() == {"status": "success"}
    rows = lines(client.post("/api/pull", json={"name": f"{MODEL}:latest", "insecure": True}))
    assert rows[-1] == {"status": "success"}
    refused(client.post("/api/pull", json={"model": "other"}), "other", 404)


def test_what_this_server_does_not_do(client: httpx.Client):
    for path in ("create", "copy", "push", "blobs/sha256:00"):
        refused(client.post(f"/api/{path}", json={"model": "a"}), "started with", 404)
    refused(client.delete("/api/delete"), "started with", 404)
    assert client.head("/api/blobs/sha256:00").status_code == 404
    for path in ("/api/embed", "/api/embeddings"):
        refused(client.post(path, json={"model": MODEL}), "makes no embeddings: it is a model that generates text")
    refused(client.get("/api/nothing"), "route", 404)
    refused(client.get(CHAT), status=405)


def test_the_root_says_what_runs(client: httpx.Client):
    reply = client.get("/")
    assert (reply.text, reply.headers["content-type"]) == ("Ollama is running", "text/plain; charset=utf-8")
    assert client.head("/").status_code == 200
    page = client.get("/", headers={"accept": "text/html,*/*"})
    assert (page.status_code, page.headers["location"]) == (307, "ui/"), "for people"
    with running_server(disable_ui=True) as other:
        page = httpx.get(f"{other.url}/", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")


def test_a_key_is_taken_as_a_bearer_token():
    with running_server(api_key="k") as server, httpx.Client(base_url=server.url) as client:
        refused(client.get("/api/tags"), "api key", 401)
        refused(client.post(CHAT, json=ASKED), "api key", 401)
        assert client.get("/api/tags", headers={"authorization": "Bearer k"}).status_code == 200
        assert client.get("/").status_code == 200
