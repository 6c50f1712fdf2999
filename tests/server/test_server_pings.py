"""Keep-alives in streams that have nothing to say: a comment, or Anthropic's `ping`, and none where there is no form for one."""

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import MODEL, FakeFrontend, Running, Script, make_app, running_server

from headrace.errors import CapacityError, RequestError
from headrace.server.http import Exchange
from headrace.server.sse import COMMENT, stream_reply

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
INPUT = {"model": MODEL, "input": "hi", "stream": True}
PROMPT = {"model": MODEL, "prompt": "hi", "stream": True}
COMMENTED = ": keep-alive"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running_server(fake_context_length=4096, sse_ping_interval_s=0.01) as running:
        yield running


@pytest.mark.parametrize("hold_at", [0, 2])
@pytest.mark.parametrize(
    ("path", "body", "ping"),
    [
        ("/v1/chat/completions", CHAT, COMMENTED),
        ("/v1/completions", PROMPT, COMMENTED),
        ("/generate", {"text": "hi", "stream": True}, COMMENTED),
        ("/v1/responses", INPUT, COMMENTED),
        ("/v1/messages", CHAT | {"max_tokens": 40}, 'data: {"type":"ping"}'),
    ],
)
def test_a_stream_that_waits_says_so_and_then_goes_on(server: Running, client: httpx.Client, path, body, ping, hold_at):
    server.frontend.script = Script(hold_at=hold_at)
    with client.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        lines, num_pings = [], 0
        for line in reply.iter_lines():
            lines.append(line)
            num_pings += line == ping
            if num_pings == 3:
                server.frontend.release()
    said = [line for line in lines if line.startswith("data: {") and line != ping]

    assert num_pings >= 3
    assert "wörld" in "".join(map(str, map(text_of, said))) or "wörld" in said[-1]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", CHAT, "max_tokens"),
        ("/v1/completions", PROMPT, "max_tokens"),
        ("/v1/completions", PROMPT | {"prompt": [[1, 2, 3], [4]]}, "max_tokens"),
        ("/v1/responses", INPUT, "max_output_tokens"),
        ("/v1/messages", CHAT, "max_tokens"),
    ],
)
def test_a_stream_that_begins_with_a_ping_says_what_its_limit_became(
    server: Running, client: httpx.Client, path, body, field
):
    server.frontend.script = Script(hold_at=0)
    with client.stream("POST", path, json=body | {field: 32_000}) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        server.frontend.release()
        assert len([*lines]) > 1
    assert "ping" in first or first == COMMENTED
    room = min(params.max_new_tokens for params in server.frontend.resolved)
    assert reply.headers["x-headrace-noted"] == f"{field}={room}"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", CHAT, "max_tokens"),
        ("/v1/completions", PROMPT, "max_tokens"),
        ("/v1/responses", INPUT, "max_output_tokens"),
        ("/v1/messages", CHAT | {"max_tokens": 40}, "max_tokens"),
        ("/api/chat", CHAT, "num_predict"),
    ],
)
def test_an_error_in_a_stream_names_the_fields_of_the_api(server: Running, client: httpx.Client, path, body, field):
    server.frontend.script = Script(fail_at=2, error=RequestError("max_new_tokens is too large", "max_new_tokens"))
    reply = client.post(path, json=body)

    assert reply.status_code == 200
    assert f"{field} is too large" in reply.text
    assert "max_new_tokens" not in reply.text


def text_of(line: str) -> Any:
    data = json.loads(line.removeprefix("data: "))
    choice = next(iter(data.get("choices", [])), {})
    delta = data.get("delta", {})
    return (
        choice.get("text")
        or choice.get("delta", {}).get("content")
        or (delta if isinstance(delta, str) else delta.get("text", ""))
        or ""
    )


class FakeExchange:
    """Keeps what is sent. pinged: set once there have been three pings."""

    def forget_body(self) -> None: ...

    def __init__(self, ping_interval_s: float, first_ping_s: float | None = None) -> None:
        self.ping_interval_s = ping_interval_s
        self.first_ping_s = ping_interval_s if first_ping_s is None else first_ping_s
        self.sent: list[Any] = []
        self.pinged = asyncio.Event()

    def until_client_leaves(self):
        return asyncio.timeout(60)

    async def send(self, message):
        self.sent.append(message.get("status", message.get("body")))

    async def write(self, part):
        self.sent.append(part)
        if self.sent.count(COMMENT) == 3:
            self.pinged.set()


async def streamed(
    exchange: FakeExchange, released: asyncio.Event, error: Exception | None = None, **options: Any
) -> list[Any]:
    async def items():
        await released.wait()
        if error is not None:
            raise error
        yield b"item"

    await stream_reply(exchange, items(), bytes, bytes, done=b"done", **options)
    return exchange.sent


async def test_nothing_is_added_where_there_is_no_form_for_it_or_it_is_turned_off():
    pinged, ollama, off = FakeExchange(0.001), FakeExchange(0.001), FakeExchange(0.0)
    replies = [
        asyncio.create_task(streamed(pinged, pinged.pinged)),
        asyncio.create_task(streamed(ollama, pinged.pinged, ping=b"")),
        asyncio.create_task(streamed(off, pinged.pinged)),
    ]
    await asyncio.gather(*replies)

    assert pinged.sent[:4] == [200, COMMENT, COMMENT, COMMENT]
    assert pinged.sent[-2:] == [b"item", b"done"]
    assert ollama.sent == off.sent == [200, b"item", b"done"]


async def test_a_failure_after_a_keep_alive_is_told_in_the_stream():
    exchange = FakeExchange(0.001)
    sent = await streamed(exchange, exchange.pinged, CapacityError("no room"))

    assert sent[0] == 200
    assert b"no room" in sent[-1]
    assert sent[-1].endswith(b"done")


async def test_a_failure_before_any_is_raised():
    exchange, released = FakeExchange(60.0), asyncio.Event()
    released.set()
    with pytest.raises(CapacityError):
        await streamed(exchange, released, CapacityError("no room"))

    assert exchange.sent == []


class StuckExchange(FakeExchange):
    """Its first ping fails, or never ends."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(0.001)
        self.error = error

    async def write(self, part):
        if part == COMMENT and not self.pinged.is_set():
            self.pinged.set()
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        await super().write(part)


async def test_a_ping_that_cannot_be_sent_is_no_error_of_its_own():
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    exchange = StuckExchange(ConnectionResetError())
    sent = await streamed(exchange, exchange.pinged)
    gc.collect()

    assert [part for part in sent if part != COMMENT] == [200, b"item", b"done"]
    assert unhandled == []


async def test_a_ping_ends_with_the_handler_that_sends_it():
    before = asyncio.all_tasks()
    exchange = StuckExchange(None)
    reply = asyncio.create_task(streamed(exchange, asyncio.Event()))
    await exchange.pinged.wait()
    reply.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reply

    assert asyncio.all_tasks() == before


async def test_what_the_limit_of_the_queue_may_still_refuse_has_not_begun():
    pinged, waiting = FakeExchange(0.001), FakeExchange(0.001, first_ping_s=60.0)
    reply = asyncio.create_task(streamed(pinged, pinged.pinged))
    with pytest.raises(CapacityError):
        await streamed(waiting, pinged.pinged, CapacityError("no room"))
    await reply

    assert waiting.sent == []


@pytest.mark.parametrize("first", [b"item", b""])
async def test_once_it_has_said_something_it_is_pinged_as_ever(first):
    exchange = FakeExchange(0.001, first_ping_s=60.0)

    async def items():
        yield first
        await exchange.pinged.wait()

    await stream_reply(exchange, items(), bytes, bytes, done=b"done")

    assert exchange.sent[0] == 200
    assert exchange.sent.count(COMMENT) >= 3


def test_a_server_counts_the_first_ping_from_the_limit_of_its_queue():
    app, _ = make_app(FakeFrontend(), queue_timeout_s=30.0, sse_ping_interval_s=5.0)

    exchange = Exchange({}, None, None, app.state.context)
    assert (exchange.ping_interval_s, exchange.first_ping_s) == (5.0, 35.0)
