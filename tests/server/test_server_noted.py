"""Fields that are served otherwise than they ask: the reply's header and the log say which."""

import asyncio
from typing import Any

import httpx
import pytest
from fake_frontend import CONTEXT_LENGTH, FakeFrontend, Running, make_app, running_server

from headrace.server.context import ServerStatus

NOTED = "x-headrace-noted"
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hi"}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "hi"},
    MESSAGES: {"model": "", "max_tokens": 9, "messages": [USER]},
    RESPONSES: {"input": "hi"},
}
ROOM_BESIDE_HI = CONTEXT_LENGTH - 2


def noted(client: httpx.Client, route: str, **fields: Any) -> str | None:
    """The header of a reply that must be a 200."""
    reply = client.post(route, json=GOOD[route] | fields)
    assert reply.status_code == 200, (fields, reply.text)
    return reply.headers.get(NOTED)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "route, field",
    [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETIONS, "max_tokens"), (COMPLETIONS, "max_completion_tokens"),
     (MESSAGES, "max_tokens"), (RESPONSES, "max_output_tokens")],
)  # fmt: skip
def test_more_output_than_there_is_room_for_is_lowered_and_noted(
    client: httpx.Client, server: Running, route: str, field: str, stream: bool
):
    for limit in (CONTEXT_LENGTH, 32_000, 2**40):
        header = noted(client, route, **{field: limit}, stream=stream)
        room = server.frontend.resolved[-1].max_new_tokens
        assert header == f"{field}={room}"
        assert 0 < room < CONTEXT_LENGTH
    assert noted(client, route, **{field: 7}, stream=stream) is None
    assert server.frontend.resolved[-1].max_new_tokens == 7


def test_each_prompt_of_a_list_has_its_own_room(client: httpx.Client, server: Running):
    header = noted(client, COMPLETIONS, prompt=["a" * 100, "b" * 10], max_tokens=CONTEXT_LENGTH - 50)
    assert [params.max_new_tokens for params in server.frontend.resolved] == [CONTEXT_LENGTH - 100, CONTEXT_LENGTH - 50]
    assert header == f"max_tokens={CONTEXT_LENGTH - 100}"


def test_a_limit_that_just_fits_is_not_lowered_and_a_full_context_is_refused(client: httpx.Client):
    assert noted(client, COMPLETIONS, max_tokens=ROOM_BESIDE_HI) is None
    assert noted(client, COMPLETIONS, max_tokens=ROOM_BESIDE_HI + 1) == f"max_tokens={ROOM_BESIDE_HI}"
    for prompt in ("a" * (CONTEXT_LENGTH + 1), "a" * (2 * CONTEXT_LENGTH)):
        assert client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 32_000}).status_code == 400
    for limit in (-2, -(2**40)):
        assert client.post(COMPLETIONS, json=GOOD[COMPLETIONS] | {"max_tokens": limit}).status_code == 400
    reply = client.post(COMPLETIONS, json=GOOD[COMPLETIONS] | {"max_tokens": 9999, "min_tokens": 9000})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "min_tokens")


def test_a_prompt_that_is_cut_to_fit_keeps_half_of_the_context_beside_too_large_a_limit(
    client: httpx.Client, server: Running
):
    fields = {"truncate_prompt_tokens": -1, "max_tokens": 32_000, "prompt": "a" * (CONTEXT_LENGTH + 8)}
    assert noted(client, COMPLETIONS, **fields) == f"max_tokens={CONTEXT_LENGTH // 2}"


def test_the_native_route_refuses_what_does_not_fit(client: httpx.Client):
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 32_000}}
    assert client.post("/generate", json=body).status_code == 400


def test_a_field_is_logged_once_and_pages_may_read_the_header(caplog: pytest.LogCaptureFixture):
    async def ask() -> list[httpx.Response]:
        app, _ = make_app(FakeFrontend(), ServerStatus(started=True), allow_origins="https://chat.example")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:30000") as client:
            origin = {"origin": "https://chat.example"}
            body = GOOD[COMPLETIONS] | {"max_tokens": 9999}
            return [await client.post(COMPLETIONS, json=body, headers=origin) for _ in range(2)]

    with caplog.at_level("INFO"):
        replies = asyncio.run(ask())
    assert all(NOTED in reply.headers["access-control-expose-headers"] for reply in replies)
    lines = [record.message for record in caplog.records if NOTED in record.message]
    assert len(lines) == 1
    assert lines[0].endswith(": max_tokens")


SAID_BY_OTHERS: list[dict[str, Any]] = [
    {"options": {"num_ctx": 8192, "temperature": 0.2}}, {"num_ctx": 4096}, {"num_keep": 5}, {"num_batch": 512}, {"num_gpu": 1}, {"num_thread": 8},
    {"use_mmap": True}, {"use_mlock": True}, {"low_vram": True}, {"keep_alive": "5m"}, {"keep_alive": -1}, {"timings_per_token": True},
    {"request_id": "r1"}, {"id_slot": 3}, {"service_tier": "flex"}, {"service_tier": "priority"}, {"service_tier": "of my own"},
]  # fmt: skip


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("fields", SAID_BY_OTHERS, ids=str)
def test_what_changes_no_reply_is_noted(client: httpx.Client, route: str, fields: dict[str, Any]):
    assert noted(client, route, **fields) == next(iter(fields))


@pytest.mark.parametrize("stream", [False, True])
def test_everything_at_once_is_one_header(client: httpx.Client, stream: bool):
    fields = {"verbosity": "low", "num_ctx": 8192, "max_tokens": 9999, "reasoning_effort": "default", "stream": stream}
    header = noted(client, CHAT, **fields)
    assert header is not None
    names = [name.partition("=")[0] for name in header.split(", ")]
    assert sorted(names) == ["max_tokens", "num_ctx", "reasoning_effort", "verbosity"]


def test_verbosity_is_noted_unless_it_is_the_usual(client: httpx.Client):
    for value in ("low", "high", "some"):
        assert noted(client, CHAT, verbosity=value) == "verbosity"
        assert noted(client, RESPONSES, text={"verbosity": value}) == "text.verbosity"
    for value in ("medium", "", None):
        assert noted(client, CHAT, verbosity=value) is None
        assert noted(client, RESPONSES, text={"verbosity": value}) is None
    for route in (CHAT, COMPLETIONS, RESPONSES):
        for neutral in (
            {"service_tier": "auto"},
            {"service_tier": "default"},
            {"id_slot": -1},
            {"num_ctx": None},
            {"options": {}},
        ):
            assert noted(client, route, **neutral) is None


def test_the_names_of_ollama_and_llama_cpp_are_served(client: httpx.Client, server: Running):
    for route in (CHAT, COMPLETIONS):
        for name, value in (("n_predict", 3), ("num_predict", 4)):
            assert noted(client, route, **{name: value}) is None
            assert server.frontend.resolved[-1].max_new_tokens == value
            for unlimited in (-1, -2):
                assert noted(client, route, **{name: unlimited}) is None
                assert server.frontend.resolved[-1].max_new_tokens > 400
            assert noted(client, route, **{name: 9999}) == f"{name}={server.frontend.resolved[-1].max_new_tokens}"
        assert noted(client, route, repeat_penalty=1.3) is None
        assert server.frontend.resolved[-1].repetition_penalty == 1.3
        assert noted(client, route, repeat_penalty=1.3, repetition_penalty=1.3) is None
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        for asked in ("json", schema):
            assert noted(client, route, format=asked) is None
            grammar = server.frontend.resolved[-1].grammar
            wanted = (
                {"type": "json_object"}
                if asked == "json"
                else {"type": "json_schema", "json_schema": {"schema": schema}}
            )
            assert noted(client, route, response_format=wanted) is None
            assert grammar == server.frontend.resolved[-1].grammar is not None
        assert noted(client, route, format="") is None


def test_ollamas_words_are_served_on_responses_too(client: httpx.Client, server: Running):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert noted(client, RESPONSES, repeat_penalty=1.3) is None
    assert server.frontend.resolved[-1].repetition_penalty == 1.3
    for asked, kind in (
        ("json", {"type": "json_object"}),
        (schema, {"type": "json_schema", "name": "s", "schema": schema}),
    ):
        assert noted(client, RESPONSES, format=asked) is None
        grammar = server.frontend.resolved[-1].grammar
        assert noted(client, RESPONSES, text={"format": kind}) is None
        assert grammar == server.frontend.resolved[-1].grammar is not None
    assert noted(client, RESPONSES, format="") is None
    for fields, name in (
        ({"format": "xml"}, "format"),
        ({"format": "json", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"format": "json", "regex": "a"}, "format"),
        ({"repeat_penalty": 1.3, "repetition_penalty": 1.2}, "repeat_penalty"),
    ):
        reply = client.post(RESPONSES, json=GOOD[RESPONSES] | fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}[{{ enable_thinking }} {{ reasoning_effort }}]"
NOTHING_SAID = "[ ]"


@pytest.fixture(scope="module")
def thinking() -> Any:
    with running_server(THINKS) as running, httpx.Client(base_url=running.url, timeout=20) as client:
        yield running, client


@pytest.mark.parametrize(
    "fields, said, note",
    [
        ({"reasoning": {"effort": "high"}}, "[True high]", None),
        ({"reasoning": {"effort": "none"}}, "[False none]", None),
        ({"reasoning": {"enabled": True}}, "[True ]", None),
        ({"reasoning": {"enabled": "true"}}, "[True ]", None),
        ({"reasoning": {"enabled": False}}, "[False ]", None),
        ({"reasoning": {"enabled": True, "effort": "low"}}, "[True low]", None),
        ({"reasoning": {}}, NOTHING_SAID, None),
        ({"reasoning": None}, NOTHING_SAID, None),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "[True low]", "reasoning.summary"),
        ({"reasoning": {"effort": "default"}}, NOTHING_SAID, "reasoning.effort"),
        ({"reasoning": {"effort": "high"}, "reasoning_effort": "low"}, "[True high]", "reasoning_effort=high"),
        ({"reasoning": {"exclude": True, "effort": "low"}}, "[True low]", None),
        ({"reasoning_effort": "default"}, NOTHING_SAID, "reasoning_effort"),
        ({"thinking": {"type": "enabled"}}, "[True ]", None),
        ({"thinking": {"type": "disabled"}}, "[False ]", None),
        ({"thinking": {"type": "adaptive"}}, NOTHING_SAID, None),
        ({"thinking": {"type": "auto"}}, NOTHING_SAID, None),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, "[True ]", "thinking.clear_thinking"),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, "[True ]", None),
        ({"think": True}, "[True ]", None),
        ({"think": False}, "[False ]", None),
        ({"think": "low"}, "[True low]", None),
        ({"think": ""}, NOTHING_SAID, None),
    ],
    ids=str,
)
def test_thinking_in_the_words_of_other_clients(
    thinking: tuple[Running, httpx.Client], fields: dict[str, Any], said: str, note: str | None
):
    running, client = thinking
    assert noted(client, CHAT, **fields) == note
    prompt = running.frontend.calls[-1].input_ids
    assert running.frontend.tokenizer.decode(prompt, False) == f"hi{said}"


@pytest.mark.parametrize(
    "fields, said, note",
    [
        ({"reasoning": {"effort": "default"}}, NOTHING_SAID, "reasoning.effort"),
        ({"reasoning": {"effort": "default"}, "think": "low"}, "[True low]", "reasoning.effort"),
        ({"think": True}, "[True ]", None),
        ({"think": False}, "[False ]", None),
        ({"think": "low"}, "[True low]", None),
        ({"think": "low", "reasoning": {"effort": "high"}}, "[True high]", "think=high"),
        ({"think": ""}, NOTHING_SAID, None),
    ],
    ids=str,
)
def test_thinking_in_the_words_of_other_clients_on_responses(
    thinking: tuple[Running, httpx.Client], fields: dict[str, Any], said: str, note: str | None
):
    running, client = thinking
    assert noted(client, RESPONSES, **fields) == note
    prompt = running.frontend.calls[-1].input_ids
    assert running.frontend.tokenizer.decode(prompt, False) == f"hi{said}"


def test_reasoning_that_is_excluded_is_not_in_the_reply(thinking: tuple[Running, httpx.Client]):
    running, client = thinking
    running.frontend.script.text = "<think>hm</think>Hi"
    for fields, shown in (({}, "hm"), ({"reasoning": {"exclude": True}}, None), ({"include_reasoning": False}, None)):
        message = client.post(CHAT, json=GOOD[CHAT] | fields).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (shown, "Hi")


def test_the_native_route_has_no_such_limits(client: httpx.Client):
    assert client.post("/generate", json={"text": "hi", "sampling_params": {"temperature": 2.5}}).status_code == 200
    for route in (CHAT, COMPLETIONS, RESPONSES):
        assert noted(client, route, temperature=2.0) is None
        reply = client.post(route, json=GOOD[route] | {"temperature": 2.01})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "temperature")
