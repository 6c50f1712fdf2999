"""Which adapters are in memory, against an engine that only counts."""

import asyncio

import pytest

from headrace.errors import CapacityError, ExecutionError, NotFoundError, RequestError
from headrace.frontend.adapters import Adapters
from headrace.messages.channel import LocalQueue
from headrace.messages.weights import RESTORED, LoadLoraReq, LoraReply, UnloadLoraReq


class CountingEngine:
    """Loads everything but the paths of `bad`; holds its answers back while `gate` is closed."""

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}
        self.ever: set[int] = set()
        self.bad: set[str] = set()
        self.told: list[object] = []
        self.silent = False
        self.gate = asyncio.Event()
        self.gate.set()

    def check(self) -> None:
        """It can always be asked."""

    check_serving = replicas_up = check

    @property
    def replies(self):
        return self

    def send(self, message) -> None:
        self.told.append(message)

    async def call_every(self, living, make, timeout_s, name) -> dict[int, LoraReply]:
        return {0: await self._reply(make(7))}

    async def _reply(self, request) -> LoraReply:
        await self.gate.wait()
        if isinstance(request, UnloadLoraReq):
            self.loaded.pop(request.lora_id, None)
            return LoraReply(7, request.lora_id)
        assert isinstance(request, LoadLoraReq)
        if request.path in self.bad:
            return LoraReply(7, request.lora_id, 400, "broken")
        assert request.lora_id not in self.ever, "a number was used twice"
        self.ever.add(request.lora_id)
        self.loaded[request.lora_id] = request.path
        if self.silent:
            raise ExecutionError("no answer")
        return LoraReply(7, request.lora_id)


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def adapters(engine: CountingEngine) -> Adapters:
    return Adapters(2, [], engine, engine)


async def use(adapters: Adapters, name: str) -> int:
    adapter = await adapters.acquire(name)
    lora_id = adapter.lora_id
    adapter.release()
    return lora_id


async def test_the_one_not_used_longest_leaves_and_comes_back_under_another_number(adapters, engine):
    await adapters.load("a", "/a", pinned=False)
    await adapters.load("b", "/b", pinned=False)
    first = await use(adapters, "a")
    await adapters.load("c", "/c", pinned=False)
    assert set(engine.loaded.values()) == {"/a", "/c"}
    assert await use(adapters, "a") == first
    await use(adapters, "b")
    assert set(engine.loaded.values()) == {"/a", "/b"}
    await use(adapters, "c")
    assert await use(adapters, "a") != first
    assert adapters.names == ["a", "b", "c"]


async def test_pinned_ones_and_those_in_use_stay(adapters, engine):
    await adapters.load("a", "/a", pinned=True)
    await adapters.load("b", "/b", pinned=False)
    held = await adapters.acquire("b", 2)
    held.release()
    with pytest.raises(CapacityError, match="every adapter in memory is in use or pinned"):
        await adapters.load("c", "/c", pinned=False)
    assert adapters.names == ["a", "b"]
    held.release()
    await adapters.load("c", "/c", pinned=False)
    assert set(engine.loaded.values()) == {"/a", "/c"}


async def test_unload_waits_for_users_and_refuses_new_ones(adapters, engine):
    await adapters.load("a", "/a", pinned=False)
    held = await adapters.acquire("a")
    leaving = asyncio.create_task(adapters.unload("a"))
    await asyncio.sleep(0)
    assert adapters.names == []
    for refused in (adapters.acquire("a"), adapters.unload("a")):
        with pytest.raises(RequestError, match="being unloaded"):
            await refused
    assert not leaving.done()
    assert engine.loaded
    held.release()
    await leaving
    assert not engine.loaded
    with pytest.raises(NotFoundError):
        await adapters.acquire("a")


async def test_an_unload_that_is_given_up_leaves_the_adapter(adapters, engine):
    await adapters.load("a", "/a", pinned=False)
    held = await adapters.acquire("a")
    leaving = asyncio.create_task(adapters.unload("a"))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    held.release()
    assert adapters.names == ["a"]
    assert await use(adapters, "a") in engine.loaded


async def test_a_refused_adapter_leaves_no_trace(adapters, engine):
    engine.bad = {"/bad"}
    with pytest.raises(RequestError, match="cannot be loaded: broken"):
        await adapters.load("a", "/bad", pinned=False)
    assert adapters.names == []
    with pytest.raises(NotFoundError):
        await adapters.acquire("a")
    for name in ("", "x" * 300, "a\nb"):
        with pytest.raises(RequestError, match="lora_name"):
            await adapters.load(name, "/a", pinned=False)


async def test_a_load_without_an_answer_is_taken_back(adapters, engine):
    engine.silent = True
    with pytest.raises(ExecutionError):
        await adapters.load("a", "/a", pinned=False)
    assert engine.loaded == {}
    engine.silent = False
    await adapters.load("a", "/a", pinned=False)
    assert list(engine.loaded.values()) == ["/a"]


async def test_requests_for_an_adapter_that_is_on_its_way_share_one_load(adapters, engine):
    for name in "abc":
        await adapters.load(name, f"/{name}", pinned=False)
    engine.gate.clear()
    waiting = [asyncio.create_task(use(adapters, "a")) for _ in range(3)]
    await asyncio.sleep(0)
    engine.gate.set()
    assert len(set(await asyncio.gather(*waiting))) == 1
    assert len(engine.loaded) == 2


async def test_adapters_of_the_start_have_their_numbers_in_order(engine):
    engine.ever = {1, 2}
    adapters = Adapters(3, [("a", "/a"), ("b", "/b")], engine, engine)
    assert [await use(adapters, "a"), await use(adapters, "b")] == [1, 2]
    await adapters.load("c", "/c", pinned=False)
    assert await use(adapters, "c") == 3


async def test_a_server_without_room_for_any_says_so(engine):
    with pytest.raises(RequestError, match="max-loras 0"):
        await Adapters(0, [], engine, engine).load("a", "/a", pinned=False)


def sent(queue: LocalQueue) -> list[object]:
    found = []
    while (message := queue.recv_nowait()) is not None:
        found.append(message)
    return found


async def test_a_scheduler_that_begins_again_is_sent_what_is_in_memory_now(engine):
    engine.ever = {1, 2}
    adapters = Adapters(2, [("a", "/a"), ("b", "/b")], engine, engine)
    await adapters.unload("b")
    await adapters.load("c", "/c", pinned=False)
    await adapters.load("d", "/d", pinned=True)  # a leaves memory and stays known
    queue = LocalQueue()
    adapters.tell_scheduler(queue)
    assert sent(queue) == [LoadLoraReq(RESTORED, 3, "/c", at_once=True), LoadLoraReq(RESTORED, 4, "/d", at_once=True)]
    assert adapters.names == ["a", "c", "d"]


async def test_one_that_cannot_be_restored_is_read_again_by_the_next_request(adapters, engine):
    await adapters.load("a", "/a", pinned=False)
    first = await use(adapters, "a")
    adapters.handle(LoraReply(RESTORED, first))
    assert engine.told == []
    for _ in range(2):
        adapters.handle(LoraReply(RESTORED, first, 400, "gone"))
        assert engine.told == [UnloadLoraReq(RESTORED, first)]
    engine.bad = {"/a"}
    with pytest.raises(RequestError, match="broken"):
        await use(adapters, "a")
    engine.bad = set()
    assert await use(adapters, "a") not in {0, first}
