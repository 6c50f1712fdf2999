"""Long replies: made in pieces that add up to what a short one would be, and counted by tenant until they have been read."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest
from fake_frontend import FakeFrontend, Running, running_server, served_model

from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError
from headrace.server.context import INLINE_REPLY_BYTES, ServerStatus, ServingContext
from headrace.server.http import PIECE_BYTES, Exchange
from headrace.turns import work_for

MESSAGES = [{"role": "user", "content": "Hi"}]
TOP = {"max_tokens": 200, "seed": 1}
CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", TOP | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}, "choices"),
    "completion": ("/v1/completions", TOP | {"prompt": "Hi", "logprobs": 20, "echo": True}, "choices"),
    "native": (
        "/generate",
        {"text": "Hi", "return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0},
        "",
    ),
}


ONE_CHOICE: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "max_tokens": 480}),
    "completion": ("/v1/completions", {"prompt": "Hi", "logprobs": 20, "echo": True, "max_tokens": 480}),
    "ids": (
        "/v1/completions",
        {"prompt": "Hi", "logprobs": 1, "logprob_token_ids": [*range(50)], "max_tokens": 480, "prompt_logprobs": 2},
    ),
    "response": ("/v1/responses", {"input": "Hi", "top_logprobs": 20, "max_output_tokens": 480}),
    "ollama": (
        "/api/generate",
        {"prompt": "Hi", "logprobs": True, "top_logprobs": 20, "options": {"num_predict": 480}, "stream": False},
    ),
    "native": (
        "/generate",
        {"text": "Hi", "return_logprob": True, "top_logprobs_num": 20, "sampling_params": {"max_new_tokens": 480}},
    ),
}


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        server.frontend.script.text = "Hello, you" * 20
        yield server


@pytest.fixture
def client(server: Running):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def choices(client: httpx.Client, name: str, n: int) -> tuple[httpx.Response, list[dict[str, Any]]]:
    path, body, field = CALLS[name]
    body = body | ({"sampling_params": {"n": n, "max_new_tokens": 200}} if path == "/generate" else {"n": n})
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    made = response.json()
    return response, made[field] if field else made if isinstance(made, list) else [made]


def without_index(choice: dict[str, Any]) -> dict[str, Any]:
    if "meta_info" in choice:
        kept = {name: value for name, value in choice["meta_info"].items() if name.endswith("logprobs")}
        return {"text": choice["text"], "ids": choice["output_ids"], **kept}
    return {name: value for name, value in choice.items() if name != "index"}


@pytest.mark.parametrize("name", CALLS)
def test_a_long_reply_has_what_short_ones_have(client: httpx.Client, name: str):
    short, [one] = choices(client, name, 1)
    long, many = choices(client, name, 8)

    assert "content-length" in short.headers
    assert "content-length" not in long.headers
    assert [choice["index"] for choice in many] == list(range(8))
    assert all(without_index(choice) == without_index(one) for choice in many)
    assert set(short.json()) == set(long.json()) if isinstance(long.json(), dict) else True


@pytest.mark.parametrize("name", ONE_CHOICE)
def test_a_long_choice_is_made_in_pieces(server: Running, monkeypatch: pytest.MonkeyPatch, name: str):
    sizes: list[int] = []
    reply_in_pieces = Exchange.reply_in_pieces

    async def watched(exchange: Exchange, pieces: Iterator[bytes], *more: Any, **named: Any) -> None:
        def seen() -> Iterator[bytes]:
            for piece in pieces:
                sizes.append(len(piece))
                yield piece

        await reply_in_pieces(exchange, seen(), *more, **named)

    monkeypatch.setattr(Exchange, "reply_in_pieces", watched)
    monkeypatch.setattr(server.frontend.script, "text", "Hello, you" * 48)
    path, body = ONE_CHOICE[name]
    reply = httpx.post(server.url + path, json=body, timeout=20)

    assert reply.status_code == 200, reply.text
    assert len(reply.content) == sum(sizes) > 2 * max(sizes)
    assert "content-length" not in reply.headers
    assert reply.text.count("-19.5") >= (0 if name == "ids" else 480)
    reply.json()


def test_a_client_that_knows_no_chunks_gets_a_length(server: Running):
    path, body, _ = CALLS["chat"]
    content = json.dumps(body | {"n": 8}).encode()
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port), timeout=20) as sock, sock.makefile("rb") as reply:
        sock.sendall(b"POST %b HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path.encode())
        sock.sendall(b"content-length: %d\r\n\r\n%b" % (len(content), content))
        head, _, made = reply.read().partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(made) in head
    assert len(json.loads(made)["choices"]) == 8


async def test_a_reply_does_not_wait_for_the_prompts_of_its_client():
    frontend = FakeFrontend()
    context = ServingContext(cast(Any, frontend), served_model(frontend.tokenizer), ServerArgs(), ServerStatus())
    go_on = threading.Event()
    prompts = [asyncio.create_task(context.text_threads.run(go_on.wait, 1 << 20)) for _ in range(9)]
    try:
        assert await context.written(lambda: "made", INLINE_REPLY_BYTES + 1) == "made"
    finally:
        go_on.set()
        await asyncio.gather(*prompts)
        context.close()


class SlowReader:
    """A client that reads a part of a reply whenever `read` is called. sent: the parts."""

    def __init__(self, context: ServingContext) -> None:
        self.sent: list[Any] = []
        self._reads = asyncio.Semaphore(0)
        scope = {"headrace.write": self.send, "headers": [], "path": "/"}
        self.exchange = Exchange(scope, cast(Any, None), self.send, context)

    async def send(self, message: Any) -> None:
        await self._reads.acquire()
        self.sent.append(message)

    def read(self, num_parts: int) -> None:
        for _ in range(num_parts):
            self._reads.release()


async def test_replies_that_are_not_read_are_counted_for_their_tenant():
    frontend = FakeFrontend()
    context = ServingContext(
        cast(Any, frontend), served_model(frontend.tokenizer), ServerArgs(max_reply_bytes=1 << 20), ServerStatus()
    )
    body = b"x" * (1 << 20)

    async def reply(tenant: str, body: bytes) -> tuple[SlowReader, "asyncio.Task[None]"]:
        work_for(tenant)
        reader = SlowReader(context)
        task = asyncio.create_task(reader.exchange.reply(body))
        await asyncio.sleep(0)
        return reader, task

    waiting = [await reply("a", body) for _ in range(6)]
    refused = [(await reply("a", body))[1], (await reply("a", body))[1]]
    others = await reply("b", b"x" * (1 << 19))
    short = await reply("a", b"x" * INLINE_REPLY_BYTES)
    short[0].read(9)
    await short[1]

    assert not any(task.done() for _, task in (*waiting, others))
    with pytest.raises(CapacityError, match="wait to be read"):
        await refused[1]
    for reader, task in (*waiting, others):
        reader.read(1000)
        await task
        assert len(b"".join(part.get("body", b"") for part in reader.sent)) in (1 << 20, 1 << 19)
        assert max(len(part.get("body", b"")) for part in reader.sent) == PIECE_BYTES
    assert context.replies.held == 0
    refused[0].cancel()
    context.close()


async def test_a_reply_whose_client_leaves_is_held_no_longer():
    frontend = FakeFrontend()
    context = ServingContext(cast(Any, frontend), served_model(frontend.tokenizer), ServerArgs(), ServerStatus())
    reader = SlowReader(context)
    task = asyncio.create_task(reader.exchange.reply(b"x" * (1 << 20)))
    await asyncio.sleep(0)
    assert context.replies.held
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert context.replies.held == 0
    context.close()
