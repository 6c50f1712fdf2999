"""How a server ends: signals, and the death of a part."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from headrace.serve import Ending


class Manager:
    """Its requests end when they are told to."""

    def __init__(self):
        self.requests_end = asyncio.Event()
        self.timeout_s = None

    async def drain(self, timeout_s):
        self.timeout_s = timeout_s
        await self.requests_end.wait()


class Server:
    def __init__(self):
        self.shutdowns = []
        self.ended = asyncio.Event()

    def shutdown(self, force=False):
        self.shutdowns.append("now" if force else "after its replies")
        self.ended.set()


@pytest.fixture
async def serving():
    serving = SimpleNamespace(manager=Manager(), server=Server(), status=SimpleNamespace(draining=False))
    serving.ending = Ending(serving.manager, serving.server, serving.status, 30.0)
    yield serving
    serving.ending.cancel()


async def test_the_first_signal_lets_running_requests_finish(serving):
    serving.ending.on_signal()
    await asyncio.sleep(0)

    assert serving.status.draining
    assert serving.manager.timeout_s == 30.0
    assert serving.server.shutdowns == []
    serving.manager.requests_end.set()
    await asyncio.wait_for(serving.server.ended.wait(), 60)
    assert serving.server.shutdowns == ["after its replies"]
    assert serving.ending.exit_code == 0


async def test_the_second_signal_ends_them(serving):
    serving.ending.on_signal()
    serving.ending.on_signal()

    assert serving.server.shutdowns == ["now"]


async def test_the_death_of_a_part_is_an_exit_code_from_any_thread(serving):
    thread = threading.Thread(target=serving.ending.on_death)
    thread.start()
    await asyncio.wait_for(serving.server.ended.wait(), 60)
    thread.join()

    assert serving.status.draining
    assert serving.server.shutdowns == ["after its replies"]
    assert serving.ending.exit_code == 1
