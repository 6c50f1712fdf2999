"""The OpenAI routes: order and framing of streams, equality with the plain reply, counts, logprobs, the official client."""

import json
from typing import Any

import httpx
import openai
import pytest
from fake_frontend import CONTEXT_LENGTH, MODEL, TEMPLATE, Running, byte_tokenizer, events, running_server

from headrace.errors import CapacityError, ExecutionError
from headrace.messages.outputs import FinishReason
from headrace.text.chat_templates import ChatTemplate

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = "Hello, wörld 🙂!"
NUM_TOKENS = len(TEXT.encode())


def by_index(chunks: list[Any]) -> dict[int, list[Any]]:
    choices: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            choices.setdefault(choice["index"], []).append(choice)
    return choices


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 1000])
@pytest.mark.parametrize("n", [1, 3])
def test_a_chat_stream_says_what_the_plain_reply_says(
    client: httpx.Client, server: Running, tokens_per_chunk: int, n: int
):
    server.frontend.script.tokens_per_chunk = tokens_per_chunk
    body = CHAT | {"n": n, "logprobs": True, "top_logprobs": 2}
    plain = client.post("/v1/chat/completions", json=body).json()
    usage = {"stream_options": {"include_usage": True}}
    chunks = events(client.post("/v1/chat/completions", json=body | {"stream": True} | usage))

    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain["usage"]
    assert all(c["usage"] is None and len(c["choices"]) == 1 for c in chunks[:-1])
    choices = by_index(chunks)
    assert sorted(choices) == list(range(n))
    for index, own in choices.items():
        assert own[0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
        whole = plain["choices"][index]
        assert own[-1]["finish_reason"] == whole["finish_reason"] == "stop"
        assert own[-1]["matched_stop"] == whole["matched_stop"] == 2
        assert "".join(c["delta"]["content"] for c in own) == whole["message"]["content"] == TEXT
        assert all(c["delta"]["reasoning_content"] is None for c in own)
        logprobs = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert logprobs == whole["logprobs"]["content"]
        assert len(logprobs) == NUM_TOKENS
        assert b"".join(bytes(entry["bytes"]) for entry in logprobs) == TEXT.encode()
        assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["hé", ["hé", "yo!"], [65, 66], [[65, 66], [67]]])
def test_a_completion_stream_says_what_the_plain_reply_says(
    client: httpx.Client, server: Running, prompt: object, echo: bool
):
    server.frontend.script.tokens_per_chunk = 2
    body = {"model": MODEL, "prompt": prompt, "n": 2, "logprobs": 1, "echo": echo, "max_tokens": 100}
    plain = client.post("/v1/completions", json=body).json()
    usage = {"stream_options": {"include_usage": True}}
    chunks = events(client.post("/v1/completions", json=body | {"stream": True} | usage))

    assert chunks[-1]["usage"] == plain["usage"]
    choices = by_index(chunks)
    assert [c["index"] for c in plain["choices"]] == sorted(choices)
    for index, own in choices.items():
        whole = plain["choices"][index]
        assert "".join(c["text"] for c in own) == whole["text"]
        assert own[-1]["finish_reason"] == whole["finish_reason"]
        assert all(c["finish_reason"] is None for c in own[:-1])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [item for c in own if c["logprobs"] for item in c["logprobs"][name]]
            assert joined == whole["logprobs"][name]
            assert len(joined) == NUM_TOKENS + (len(own[0]["text"]) and echo and prompt_length(prompt, index // 2))


def prompt_length(prompt: Any, number: int) -> int:
    """Tokens of one prompt of a request."""
    one = prompt[number] if isinstance(prompt, list) and isinstance(prompt[0], str | list) else prompt
    return len(one.encode()) if isinstance(one, str) else len(one)


def test_text_offsets_point_into_the_text(client: httpx.Client):
    body = {"model": MODEL, "prompt": "hé", "logprobs": 0, "echo": True, "max_tokens": 100}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]

    assert text == "hé" + TEXT
    assert logprobs["token_logprobs"][0] is None
    # Not one alternative was asked for: the token itself is there all the same.
    pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    sampled = [None if value is None else {token: value} for token, value in pairs]
    assert logprobs["top_logprobs"] == sampled
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
    assert logprobs["text_offset"][:4] == [0, 1, 1, 2]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_usage_counts_a_prompt_once_and_every_sample(client: httpx.Client, server: Running):
    server.frontend.script.cached_tokens = 1
    usage = client.post("/v1/completions", json={"model": MODEL, "prompt": ["abc", "de"], "n": 3, "max_tokens": 4}).json()["usage"]  # fmt: skip
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 24,
        "total_tokens": 29,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_no_usage_chunk_unless_asked(client: httpx.Client):
    chunks = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_default_limits_of_each_route(client: httpx.Client, server: Running):
    server.frontend.script.text = "x" * 1000
    completion = client.post("/v1/completions", json={"model": MODEL, "prompt": "hi"}).json()
    assert completion["usage"]["completion_tokens"] == 16
    chat = client.post("/v1/chat/completions", json=CHAT).json()
    assert chat["usage"]["total_tokens"] == CONTEXT_LENGTH
    assert chat["choices"][0]["finish_reason"] == "length"
    short = client.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": 3}).json()
    assert short["usage"]["completion_tokens"] == 3


ENDS = {
    "stop string": (FinishReason("stop", matched="END"), "stop", "END", "END"),
    "asked token": (FinishReason("stop", matched=7), "stop", 7, 7),
    "end of text": (FinishReason("stop", matched=2), "stop", 2, None),
    "length": (FinishReason("length", length=3), "length", None, None),
    "abort": (FinishReason("abort", message="aborted", status_code=0), "abort", None, None),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("end", ENDS)
def test_a_choice_says_what_ended_it(client: httpx.Client, server: Running, path: str, end: str):
    script, *expected = ENDS[end]
    server.frontend.script.ends = {0: script}
    body = (CHAT if "chat" in path else {"model": MODEL, "prompt": "hi"}) | {"max_tokens": 3, "stop_token_ids": [7]}
    [plain] = client.post(path, json=body).json()["choices"]
    last = by_index(events(client.post(path, json=body | {"stream": True})))[0][-1]
    for choice in (plain, last):
        assert [choice[name] for name in ("finish_reason", "matched_stop", "stop_reason")] == expected


def test_the_last_text_and_the_finish_reason_are_one_chunk(client: httpx.Client):
    chat = by_index(events(client.post("/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 2})))[0]
    assert [(c["delta"]["content"], c["finish_reason"]) for c in chat] == [("", None), ("H", None), ("e", "length")]
    body = {"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": 2}
    text = by_index(events(client.post("/v1/completions", json=body)))[0]
    assert [(c["text"], c["finish_reason"]) for c in text] == [("H", None), ("e", "length")]


def test_an_end_without_text_is_a_chunk_with_an_empty_delta(client: httpx.Client, server: Running):
    server.frontend.script.text = ""
    chunks = by_index(events(client.post("/v1/chat/completions", json=CHAT | {"stream": True})))[0]
    assert [(c["delta"], c["finish_reason"]) for c in chunks[1:]] == [({"reasoning_content": None}, "stop")]


def test_a_message_has_a_place_for_reasoning(client: httpx.Client):
    message = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": TEXT, "reasoning_content": None, "refusal": None}


def test_a_choice_ends_as_soon_as_it_has_finished(client: httpx.Client, server: Running):
    server.frontend.script.ends = {0: FinishReason("length", length=3)}
    chunks = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True, "n": 2, "max_tokens": 3}))
    order = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert order.index((0, "length")) < max(i for i, (index, _) in enumerate(order) if index == 1)


def test_an_error_before_the_first_token_is_a_true_status(client: httpx.Client, server: Running):
    for error, status in (
        (CapacityError("full", 2.4), 503),
        (CapacityError("slow down", 0.1, 429), 429),
        (ExecutionError("broke"), 500),
    ):
        server.frontend.script.fail_at, server.frontend.script.error = 0, error
        for stream in (False, True):
            reply = client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
            assert reply.status_code == status
            assert reply.json()["error"]["message"] == error.message
            if status != 500:
                assert int(reply.headers["retry-after"]) >= 1
            known = {429: ("requests", "rate_limit_exceeded")}
            assert (reply.json()["error"]["type"], reply.json()["error"]["code"]) == known.get(
                status, (error.error_type, None)
            )


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_an_error_after_the_first_token_is_a_frame_and_done(client: httpx.Client, server: Running, route: str):
    server.frontend.script.fail_at, server.frontend.script.error = 2, ExecutionError("the engine has stopped")
    body = {"text": "hi"} if route == "/generate" else CHAT if "chat" in route else {"model": MODEL, "prompt": "hi"}
    frames = events(client.post(route, json=body | {"stream": True}))
    assert frames[-1]["error"]["message"] == "the engine has stopped"
    assert frames[-1]["error"]["type"] == "internal_error"
    assert sum("error" in frame for frame in frames) == 1


def test_an_unexpected_error_in_a_stream_tells_nothing(client: httpx.Client, server: Running, caplog: Any):
    server.frontend.script.fail_at, server.frontend.script.error = 2, KeyError("/secret")
    frames = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert frames[-1]["error"]["message"] == "internal error"
    assert "/secret" not in json.dumps(frames)


def test_a_sample_that_fails_midway_ends_alone(client: httpx.Client, server: Running):
    server.frontend.script.ends = {1: FinishReason("abort", message="broke", status_code=500)}
    frames = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True, "n": 3, "max_tokens": 3}))
    reasons = {
        index: [c["finish_reason"] for c in own if c["finish_reason"]] for index, own in by_index(frames).items()
    }
    assert reasons == {0: ["length"], 1: ["abort"], 2: ["length"]}
    assert frames[-1]["error"]["message"] == "broke"
    plain = client.post("/v1/chat/completions", json=CHAT | {"n": 3, "max_tokens": 3}).json()
    assert [c["finish_reason"] for c in plain["choices"]] == ["length", "abort", "length"]


@pytest.mark.parametrize(
    "status,kind,code",
    [
        (500, "internal_error", None),
        (503, "overloaded_error", None),
        (429, "requests", "rate_limit_exceeded"),
        (404, "not_found_error", None),
        (400, "invalid_request_error", None),
    ],
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/generate"])
def test_an_error_frame_says_what_a_status_would(
    client: httpx.Client, server: Running, route: str, status: int, kind: str, code: str | None
):
    server.frontend.script.ends = {0: FinishReason("abort", message="broke", status_code=status)}
    body = {"text": "hi"} if route == "/generate" else CHAT
    error = events(client.post(route, json=body | {"stream": True}))[-1]["error"]
    assert error == {"message": "broke", "type": kind, "param": None, "code": code}


def test_an_abort_by_the_client_is_no_error(client: httpx.Client, server: Running):
    server.frontend.script.ends = {0: FinishReason("abort", message="aborted", status_code=0)}
    frames = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert by_index(frames)[0][-1]["finish_reason"] == "abort"
    assert not any("error" in frame for frame in frames)


@pytest.mark.parametrize(
    "extra, param",
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools[1].name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ({"cache_prompt": False}, "cache_prompt"),
        ({"mirostat": 2}, "mirostat"),
        ({"n_predict": 5, "max_tokens": 6}, "max_tokens"),
        ({"num_predict": -3}, "num_predict"),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"format": "yaml"}, "format"),
        ({"format": "json", "response_format": {"type": "json_object"}}, "response_format"),
        ({"think": "enormous"}, "think"),
        ({"think": True, "thinking": {"type": "disabled"}}, "think"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "much": True}}, "thinking.much"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"reasoning": "high"}, "reasoning"),
        ({"temperature": 2.1}, "temperature"),
        (
            {"add_generation_prompt": True, "continue_final_message": True, "messages": [{"role": "assistant", "content": "a"}]},
            "add_generation_prompt",
        ),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages[0].prefix"),
        ({"functions": [{}]}, "functions[0].name"),
        ({"functions": ["f"]}, "functions[0]"),
        ({"functions": [{"name": "f"}] * 2}, "functions[1].name"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": "sometimes"}, "function_call"),
        ({"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}}, "prediction.content[0].type"),
        ({"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}}, "prediction.content[1].text"),
        ({"prediction": {"type": "content", "content": [{"type": "refusal", "refusal": "no"}]}}, "prediction.content[0].type"),
        ({"prediction": {"type": "content", "content": [{"type": "text", "text": "a", "file": {"file_id": "x"}}]}}, "prediction.content[0].file"),
        ({"prediction": {"type": "content", "content": ["a"]}}, "prediction.content[0]"),
        ({"prediction": {"type": "content", "content": []}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": None}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        ({"prediction": {"type": "text", "content": "a"}}, "prediction.type"),
        ({"prediction": "a"}, "prediction"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"service_tier": 5}, "service_tier"),
        ({"verbosity": 1}, "verbosity"),
        ({"priority": 5}, "priority"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].input_audio"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]}, "messages[0].content[0].txt"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "file": {"file_id": "x"}}]}]}, "messages[0].content[0].file"),
        ({"chat_template_kwargs": {"enable_thinkin": True}}, "chat_template_kwargs"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ],
)  # fmt: skip
def test_what_chat_does_not_do_is_refused_by_name(client: httpx.Client, extra: dict[str, Any], param: str):
    reply = client.post("/v1/chat/completions", json=CHAT | extra)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "given, want",
    [
        ({"type": "content", "content": "a b"}, "a b"),
        ({"content": "a"}, "a"),
        ({"type": "content", "content": ""}, ""),
        ({"type": "content", "content": [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"type": "content", "content": "é" * 1_000_000}, "é" * 1_000_000),
        (None, None),
    ],
    ids=["a text", "no type", "empty", "parts", "2 MB", "null"],
)
def test_a_prediction_is_all_of_its_text(
    client: httpx.Client, server: Running, given: dict[str, Any] | None, want: str | None
):
    assert client.post("/v1/chat/completions", json=CHAT | {"prediction": given}).status_code == 200
    assert server.frontend.calls[0].prediction == want


@pytest.mark.parametrize(
    "extra, param",
    [
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": -1}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 9}, "best_of"),
        ({"n": 9, "best_of": 9}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"format": 5}, "format"),
    ],
)
def test_what_completions_do_not_do_is_refused_by_name(client: httpx.Client, extra: dict[str, Any], param: str):
    reply = client.post("/v1/completions", json={"model": MODEL, "prompt": "hi"} | extra)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_best_of_more_samples_are_the_choices(client: httpx.Client, server: Running, logprobs: int | None):
    """The highest logprob per token wins, not the highest sum; each prompt has its own."""
    means = {0: -0.75, 1: -0.25, 2: -0.5, 3: -1.0, 4: -0.125, 5: -2.0}
    server.frontend.script.sampled = lambda index: (f"#{index}" * (index + 1), means[index])
    body = {
        "model": MODEL,
        "prompt": ["hé", "yo"],
        "n": 2,
        "best_of": 3,
        "logprobs": logprobs,
        "echo": True,
        "max_tokens": 100,
    }
    reply = client.post("/v1/completions", json=body).json()
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [
        (0, "hé" + "#1" * 2), (1, "hé" + "#2" * 3), (2, "yo" + "#4" * 5), (3, "yo" + "#3" * 4),
    ]  # fmt: skip
    assert all((c["logprobs"] is None) == (logprobs is None) for c in reply["choices"])
    assert reply["usage"]["prompt_tokens"] == 5
    assert reply["usage"]["completion_tokens"] == sum(2 * (index + 1) for index in means)
    server.frontend.script.ends = {1: FinishReason("abort", message="broke", status_code=500)}
    texts = [c["text"] for c in client.post("/v1/completions", json=body).json()["choices"]]
    assert texts[:2] == ["hé" + "#2" * 3, "hé" + "#0"], "one that failed is no choice while there are others"


def test_as_many_samples_as_choices_are_as_without_best_of(client: httpx.Client, server: Running):
    for fields in ({"n": 2, "best_of": 2, "stream": True}, {"best_of": 1, "stream": True}, {"n": 2, "best_of": 2}):
        reply = client.post("/v1/completions", json={"model": MODEL, "prompt": "a"} | fields)
        assert reply.status_code == 200, reply.text
        assert not server.frontend.calls[-1].return_logprob


def test_values_that_ask_for_nothing_are_accepted(client: httpx.Client):
    neutral = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "store": False,
        "service_tier": "auto", "verbosity": "medium", "separate_reasoning": False, "user": "me", "metadata": {"a": "b"},
        "safety_identifier": "x", "prompt_cache_key": "k", "stop": None, "n": None, "logit_bias": None, "seed": None,
    }  # fmt: skip
    assert client.post("/v1/chat/completions", json=CHAT | neutral).status_code == 200
    assert (
        client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "best_of": 1, "suffix": ""}).status_code
        == 200
    )


def test_a_reply_of_the_official_client_can_be_sent_back(client: httpx.Client, server: Running):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as official:
        message = official.chat.completions.create(**CHAT).choices[0].message
    cited = {
        "type": "url_citation",
        "url_citation": {"start_index": 0, "end_index": 1, "title": "T", "url": "https://x"},
    }
    sent_back = [message.model_dump(), message.model_dump() | {"tool_calls": [], "annotations": []}]
    sent_back.append(message.model_dump() | {"annotations": [cited]})
    for one in sent_back:
        assert {"annotations", "audio", "function_call", "refusal", "tool_calls"} <= one.keys()
        assert (
            client.post("/v1/chat/completions", json=CHAT | {"messages": [*CHAT["messages"], one]}).status_code == 200
        )


def test_arguments_that_the_template_uses_reach_it(client: httpx.Client, server: Running):
    body = CHAT | {"chat_template_kwargs": {"reasoning_effort": "none at all"}}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert byte_tokenizer().decode(server.frontend.calls[0].input_ids, False).endswith("[none at all]")


def test_sampling_fields_reach_the_engine(client: httpx.Client, server: Running):
    asked = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.2, "presence_penalty": 0.3,
        "repetition_penalty": 1.1, "stop": ["a"], "stop_token_ids": [1], "seed": 7, "logit_bias": {"3": 1.5},
        "ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True,
        "bad_words": ["b"], "allowed_token_ids": [1, 2], "stop_regex": "c",
    }  # fmt: skip
    others = {"max_tokens": 9, "min_tokens": 2, "n": 2, "rid": "mine", "cache_salt": "salt", "data_parallel_rank": 0}
    for route, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"model": MODEL, "prompt": "hi"})):
        server.frontend.reset()
        reply = client.post(route, json=body | asked | others)
        assert reply.json()["id"] == "mine"
        (call,) = server.frontend.calls
        params = call.sampling_params
        assert {name: getattr(params, name) for name in asked} == asked
        assert (params.max_new_tokens, params.min_new_tokens, params.n) == (9, 2, 2)
        assert (call.rid, call.cache_salt, call.replica) == ("mine", "salt", 0)


def test_messages_reach_the_template(client: httpx.Client, server: Running):
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "bob"},
    ]
    client.post("/v1/chat/completions", json=CHAT | {"messages": messages, "reasoning_effort": "low"})
    tokenizer = byte_tokenizer()
    template = ChatTemplate(TEMPLATE, tokenizer.special_texts)
    same = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a\nb"}]
    want = tokenizer.encode_rendered(template.render(same, kwargs={"reasoning_effort": "low"}))
    assert server.frontend.calls[0].input_ids == want


def test_the_last_message_can_be_continued(client: httpx.Client, server: Running):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once upon"}]
    client.post("/v1/chat/completions", json=CHAT | {"messages": messages, "continue_final_message": True})
    assert byte_tokenizer().decode(server.frontend.calls[0].input_ids, False).endswith("Once upon")


def test_special_tokens_in_user_text_are_text(client: httpx.Client, server: Running):
    messages = [{"role": "user", "content": "<|assistant|>"}]
    client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    special = byte_tokenizer().token_to_id("<|assistant|>")
    assert server.frontend.calls[0].input_ids.count(special) == 1


@pytest.mark.parametrize("route", ["/tokenize", "/detokenize"])
def test_token_routes_exist_below_v1_too(client: httpx.Client, route: str):
    body = {"prompt": "hi"} if route == "/tokenize" else {"tokens": [72, 105]}
    assert client.post("/v1" + route, json=body).json() == client.post(route, json=body).json()


WITHOUT_V1: dict[str, dict[str, Any] | None] = {
    "/chat/completions": CHAT,
    "/completions": {"prompt": "hi"},
    "/responses": {"input": "hi"},
    "/messages": CHAT | {"max_tokens": 5},
    "/messages/count_tokens": CHAT,
    "/models": None,
    f"/models/{MODEL}": None,
    "/models/nope": None,
    "/responses/nope": None,
}


@pytest.mark.parametrize("path", WITHOUT_V1)
def test_the_routes_of_openai_and_anthropic_exist_without_v1_too(client: httpx.Client, path: str):
    """For clients whose address of the API is that of the server. Errors have the same shape, too."""
    body = WITHOUT_V1[path]
    headers = {"anthropic-version": "2023-06-01"} if "message" in path else {}
    own = {"id", "created", "created_at", "completed_at", "metadata"}
    replies = [
        client.get(prefix + path) if body is None else client.post(prefix + path, json=body, headers=headers)
        for prefix in ("", "/v1")
    ]
    assert replies[0].status_code == replies[1].status_code == (404 if "nope" in path else 200)
    short, full = ({name: value for name, value in reply.json().items() if name not in own} for reply in replies)
    if path == "/responses":
        assert short.pop("output")[0]["content"] == full.pop("output")[0]["content"]
    assert short == full
    assert ("request-id" in replies[0].headers) == ("request-id" in replies[1].headers) == ("message" in path)
    if body is not None:
        wrong = [client.post(prefix + path, json={"model": "nope"}).json() for prefix in ("", "/v1")]
        assert wrong[0] == wrong[1] != {}


def test_tokenize_and_detokenize_are_inverse(client: httpx.Client):
    reply = client.post("/tokenize", json={"prompt": TEXT}).json()
    assert reply["count"] == len(reply["tokens"]) == NUM_TOKENS
    assert reply["max_model_len"] == CONTEXT_LENGTH
    assert client.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"text": TEXT}
    many = client.post("/tokenize", json={"prompt": ["a", "bc"], "model": MODEL}).json()
    assert many["count"] == [1, 2]
    assert client.post("/detokenize", json={"tokens": many["tokens"]}).json() == {"text": ["a", "bc"]}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"text": ""}
    for tokens in ([-1], [10**6], [True], [1.5], [1, [2]], "x"):
        assert client.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_tokenize_renders_messages_as_a_chat_does(client: httpx.Client, server: Running):
    tokens = client.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
    client.post("/v1/chat/completions", json=CHAT)
    assert server.frontend.calls[0].input_ids == tokens


def test_a_model_without_a_template_cannot_chat():
    with running_server(template=None) as running:
        reply = httpx.post(running.url + "/v1/chat/completions", json=CHAT)
        assert reply.status_code == 400
        assert "chat template" in reply.json()["error"]["message"]


def test_the_official_client(server: Running):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        chat = client.chat.completions.create(**CHAT, n=2, logprobs=True)
        assert [choice.message.content for choice in chat.choices] == [TEXT, TEXT]
        with client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == NUM_TOKENS
        text = client.completions.create(model=MODEL, prompt="hi", max_tokens=100, extra_body={"top_k": 3})
        assert text.choices[0].text == TEXT
        with pytest.raises(openai.NotFoundError) as found:
            client.models.retrieve("gpt-4")
        assert found.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=[], n=2)
        assert bad.value.param == "messages"
        server.frontend.script.fail_at, server.frontend.script.error = 0, CapacityError("full")
        with pytest.raises(openai.InternalServerError) as full:
            client.chat.completions.create(**CHAT)
        assert full.value.response.headers["retry-after"] == "1"
        server.frontend.script.fail_at, server.frontend.script.error = 3, ExecutionError("the engine has stopped")
        with (
            client.chat.completions.create(**CHAT, stream=True) as stream,
            pytest.raises(openai.APIError, match="the engine has stopped"),
        ):
            list(stream)
