"""Fields that are served otherwise than they ask: the reply's header and the log say which."""

import asyncio
from typing import Any

import httpx
import pytest
from fake_frontend import CONTEXT_LENGTH, FakeFrontend, Running, make_app

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
