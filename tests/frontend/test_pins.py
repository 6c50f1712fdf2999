"""Pins that are made again on a scheduler that has started, while their owner lets go of them."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from headrace.config.server_args import ServerArgs
from headrace.frontend.pins import Pins
from headrace.frontend.tenants import ANONYMOUS
from headrace.messages.operations import PIN, UNPIN
from headrace.messages.packing import pack_int32
from headrace.messages.requests import GenerateReqInput, PromptContent

PAGE = 16
PROMPT = list(range(2 * PAGE))


class Schedulers:
    """One scheduler, and a front end that computes prompts on it. may_end: what a call waits for at its end."""

    def __init__(self) -> None:
        ready = SimpleNamespace(page_size=PAGE, max_total_tokens=10_000)
        self.pins = Pins(ServerArgs(model_path="x"), ready, self, self.generate, lambda: [0], lambda: 0.0)
        self.held: set[str] = set()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.has_begun = asyncio.Event()

    async def ask(self, name: str, request: bytes) -> dict[int, bytes]:
        if name == PIN.name:
            asked = msgspec.msgpack.decode(request, type=PIN.request)
            self.held.add(asked.id)
            return {0: msgspec.msgpack.encode(len(asked.tokens) // 4)}
        assert name == UNPIN.name
        self.held.discard(msgspec.msgpack.decode(request, type=UNPIN.request).id)
        return {0: msgspec.msgpack.encode(True)}

    async def generate(self, call, caller, pins, slot):
        self.has_begun.set()
        await self.may_end.wait()
        content = PromptContent(pack_int32(call.input_ids))
        await self.pins.hold(call, SimpleNamespace(content=content, namespace=""), pins, caller)
        yield SimpleNamespace(usage=SimpleNamespace(cached_tokens=0))

    async def pin(self) -> str:
        made = await self.pins.pin(GenerateReqInput(input_ids=[*PROMPT]), 60.0)
        return made["id"]

    async def make_again(self) -> None:
        """The scheduler starts; returns once a prompt is computed for a pin."""
        self.held.clear()
        self.may_end.clear()
        self.has_begun.clear()
        self.pins.tell_scheduler(None)
        await self.has_begun.wait()

    async def settle(self) -> None:
        self.may_end.set()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


@pytest.mark.parametrize("is_let_go", [False, True])
async def test_a_pin_that_is_let_go_while_it_is_made_again_stays_let_go(is_let_go: bool):
    schedulers = Schedulers()
    pin_id = await schedulers.pin()
    await schedulers.make_again()
    if is_let_go:
        await schedulers.pins.unpin(pin_id, ANONYMOUS)
    await schedulers.settle()
    assert schedulers.held == (set() if is_let_go else {pin_id})


async def test_a_pin_that_its_owner_made_anew_meanwhile_stays():
    schedulers = Schedulers()
    pin_id = await schedulers.pin()
    await schedulers.make_again()
    await schedulers.pins.unpin(pin_id, ANONYMOUS)
    schedulers.may_end.set()
    assert await schedulers.pin() == pin_id
    await schedulers.settle()
    assert schedulers.held == {pin_id}
