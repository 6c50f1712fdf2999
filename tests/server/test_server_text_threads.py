"""Preparing prompts in threads: waiting for one is not work, and both have their limits."""

import asyncio
import pkgutil
import threading
from typing import Any, cast

import httpx
import pytest
from fake_frontend import FakeFrontend, running_server, served_model

from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, RequestError
from headrace.server.body import INLINE_BODY_BYTES
from headrace.server.context import ServerStatus, ServingContext
from headrace.turns import Turns, note_size


@pytest.fixture
def context():
    frontend, threads = FakeFrontend(), Turns(1, "text", work_limit_s=10.0)
    yield ServingContext(
        cast(Any, frontend), served_model(frontend.tokenizer), ServerArgs(), ServerStatus(), text_threads=threads
    )
    threads.close()


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


async def test_a_request_that_finds_no_free_thread_is_asked_to_come_back(context, gate):
    ran = []
    begun = threading.Event()
    busy = asyncio.ensure_future(context.in_text_thread(lambda: (begun.set(), gate.wait())))
    assert await asyncio.to_thread(begun.wait, 10)

    context.text_threads.wait_limit_s = 0.01
    with pytest.raises(CapacityError) as refused:
        await context.in_text_thread(lambda: ran.append(1))
    gate.set()
    await busy
    context.text_threads.wait_limit_s = 10.0
    await context.in_text_thread(lambda: None)

    assert (refused.value.status_code, refused.value.retry_after_s) == (503, 1.0)
    assert ran == [], "what was refused is not computed afterwards"


async def test_work_that_takes_too_long_is_the_requests_fault(context, gate):
    """Its wait for a thread does not count."""
    context.text_threads.wait_limit_s = context.text_threads.work_limit_s = 0.01

    with pytest.raises(RequestError, match=r"took longer than 0\.01 s"):
        await context.in_text_thread(gate.wait)


async def test_what_is_made_of_a_large_body_is_made_beside_the_loop(context):
    async def thread_for(num_bytes):
        note_size(num_bytes)
        return await context.beside_others(threading.current_thread)

    assert await thread_for(INLINE_BODY_BYTES) is threading.current_thread()
    assert await thread_for(INLINE_BODY_BYTES + 1) is not threading.current_thread()


LONG = "word " * (INLINE_BODY_BYTES // 4)
ASKED = [{"role": "user", "content": LONG}]


@pytest.mark.parametrize(
    ("path", "body", "module"),
    [
        ("/v1/chat/completions", {"messages": ASKED}, "openai.chat"),
        ("/v1/messages", {"model": "default", "max_tokens": 3, "messages": ASKED}, "anthropic.messages"),
        ("/v1/messages/count_tokens", {"model": "default", "messages": ASKED}, "anthropic.messages"),
        ("/v1/responses", {"input": ASKED}, "responses.serving"),
        ("/api/chat", {"messages": ASKED, "stream": False}, "ollama.generation"),
    ],
)
def test_the_messages_of_a_large_body_are_read_beside_the_loop(path, body, module, monkeypatch):
    """In every API."""
    name = f"headrace.server.{module}.conversation_of"
    read, threads = pkgutil.resolve_name(name), []

    def noting(*args):
        threads.append(threading.current_thread().name)
        return read(*args)

    monkeypatch.setattr(name, noting)
    with running_server() as server, httpx.Client(base_url=server.url, timeout=20) as client:
        client.post(path, json=body)
    assert threads
    assert all(name.startswith("headrace-text") for name in threads)
