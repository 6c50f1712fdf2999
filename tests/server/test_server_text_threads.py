"""Preparing prompts in threads: waiting for one is not work, and both have their limits."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from fake_frontend import FakeFrontend, served_model

from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, RequestError
from headrace.server import context as context_module
from headrace.server.context import ServerStatus, ServingContext


@pytest.fixture
def context():
    frontend = FakeFrontend()
    with ThreadPoolExecutor(max_workers=1) as threads:
        yield ServingContext(
            cast(Any, frontend), served_model(frontend.tokenizer), ServerArgs(), ServerStatus(), text_threads=threads
        )


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


async def test_a_request_that_finds_no_free_thread_is_asked_to_come_back(monkeypatch, context, gate):
    monkeypatch.setattr(context_module, "TEXT_WAIT_LIMIT_S", 0.01)
    ran = []
    begun = threading.Event()
    busy = context.text_threads.submit(lambda: (begun.set(), gate.wait()))
    assert begun.wait(10)

    with pytest.raises(CapacityError) as refused:
        await context.in_text_thread(lambda: ran.append(1))
    gate.set()
    busy.result(10)
    context.text_threads.submit(lambda: None).result(10)

    assert (refused.value.status_code, refused.value.retry_after_s) == (503, 1.0)
    assert ran == [], "what was refused is not computed afterwards"


async def test_the_wait_for_a_thread_does_not_count_as_work(monkeypatch, context, gate):
    monkeypatch.setattr(context_module, "TEXT_WORK_LIMIT_S", 0.0)
    begun = threading.Event()
    context.text_threads.submit(lambda: (begun.set(), gate.wait()))
    assert begun.wait(10)
    waiting = asyncio.ensure_future(context.in_text_thread(lambda: "done"))
    await asyncio.sleep(0)
    # The limit is read when the work begins: one that was running already would be the spent one.
    monkeypatch.setattr(context_module, "TEXT_WORK_LIMIT_S", 10.0)
    gate.set()

    assert await waiting == "done"


async def test_work_that_takes_too_long_is_the_requests_fault(monkeypatch, context, gate):
    monkeypatch.setattr(context_module, "TEXT_WORK_LIMIT_S", 0.01)

    with pytest.raises(RequestError, match=r"took longer than 0\.01 s"):
        await context.in_text_thread(gate.wait)
