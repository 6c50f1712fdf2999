"""Adapters when there are several replicas, and when one of them dies: all have them, or none."""

import asyncio

import msgspec
import pytest
from frontend_fakes import READY, ByteTokenizer, answers_of, request, turns

from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, NotFoundError, RequestError
from headrace.frontend.tokenizer_manager import TokenizerManager
from headrace.messages.channel import LocalQueue, Message
from headrace.messages.outputs import BatchStrOut, FinishReason, StrOut, TokenIDOut
from headrace.messages.packing import pack_int32
from headrace.messages.requests import TokenizedGenerateReqInput
from headrace.messages.weights import RESTORED, LoadLoraReq, LoraReply, UnloadLoraReq


class Pair:
    """A front end in front of two schedulers that only listen, one adapter in memory from the start."""

    def __init__(self) -> None:
        self.inboxes = [LocalQueue(), LocalQueue()]
        self.from_engine = LocalQueue()
        args = ServerArgs(model_path="fake", dp_size=2, lora_paths="old=/old")
        self.manager = TokenizerManager(
            args, READY, ByteTokenizer(), self.inboxes[0], self.from_engine, more_schedulers=self.inboxes[1:]
        )
        self.manager.start()

    async def heard(self, replica: int) -> Message:
        """The next message that one of them gets."""
        for _ in range(1000):
            if (message := self.inboxes[replica].recv_nowait()) is not None:
                return message
            await turns(1)
        raise AssertionError("nothing came")

    async def both_hear(self) -> "tuple[LoadLoraReq | UnloadLoraReq, LoadLoraReq | UnloadLoraReq]":
        """The same, but for its id."""
        first, second = await self.heard(0), await self.heard(1)
        assert isinstance(first, LoadLoraReq | UnloadLoraReq)
        assert isinstance(second, LoadLoraReq | UnloadLoraReq)
        assert msgspec.structs.replace(first, id=second.id) == second
        return first, second

    def answer(self, asked: LoadLoraReq | UnloadLoraReq, status_code: int = 200) -> None:
        """One of them answers."""
        self.from_engine.send(LoraReply(asked.id, asked.lora_id, status_code, "no good" if status_code >= 400 else ""))

    def load(self, name: str) -> "asyncio.Task[None]":
        return asyncio.create_task(self.manager.adapters.load(name, f"/{name}"))

    def call(self, rid: str, lora_path: str | None, replica: int | None = None) -> "asyncio.Task[list[object]]":
        sampling = {"max_new_tokens": 4, "temperature": 0.0}
        asked = request("p", rid=rid, lora_path=lora_path, routed_dp_rank=replica, sampling_params=sampling)

        async def collect() -> list[object]:
            return [answer async for answer in answers_of(self.manager, asked)]

        return asyncio.create_task(collect())

    def end(self, rid: str, source: int) -> None:
        out = StrOut("done", TokenIDOut(rid, pack_int32([1]), 1, FinishReason("length", length=1)))
        self.from_engine.send(BatchStrOut((out,), source))


@pytest.fixture
async def pair():
    pair = Pair()
    yield pair
    await pair.manager.close()


async def test_a_load_is_done_when_both_have_done_it(pair):
    loading = pair.load("new")
    first, second = await pair.both_hear()
    pair.answer(first)
    await turns()
    assert not loading.done()
    assert pair.manager.adapters.names == ["old"]
    pair.answer(second)
    await loading
    assert pair.manager.adapters.names == ["old", "new"]


async def test_a_load_that_one_refuses_is_taken_back_from_both(pair):
    loading = pair.load("new")
    first, second = await pair.both_hear()
    pair.answer(first)
    pair.answer(second, 400)
    undone = await pair.both_hear()
    for asked in undone:
        assert isinstance(asked, UnloadLoraReq)
        assert asked.lora_id == first.lora_id
        pair.answer(asked)
    with pytest.raises(RequestError, match="no good"):
        await loading
    assert pair.manager.adapters.names == ["old"]


async def test_a_load_is_done_without_a_replica_that_dies_and_its_next_life_has_it(pair):
    loading = pair.load("new")
    first, _ = await pair.both_hear()
    pair.manager.parts.down("scheduler 1", 1)
    pair.answer(first)
    await loading
    assert pair.manager.adapters.names == ["old", "new"]

    inbox = pair.inboxes[1] = LocalQueue()
    pair.manager.parts.up("scheduler 1", 1, 7, inbox)
    told = [await pair.heard(1), await pair.heard(1)]
    assert [(one.lora_id, one.path) for one in told] == [(1, "/old"), (first.lora_id, "/new")]


@pytest.mark.parametrize("is_late", [False, True], ids=["before the others are done", "just when they are"])
async def test_a_replica_that_comes_back_joins_a_load_under_way(pair, is_late):
    pair.manager.parts.down("scheduler 1", 1)
    loading = pair.load("new")
    first = await pair.heard(0)
    inbox = pair.inboxes[1] = LocalQueue()
    if is_late:
        # The reply is taken in the same turn of the loop as the return: whoever waits for it has not run in between.
        pair.manager.adapters.handle(LoraReply(first.id, first.lora_id))
    pair.manager.parts.up("scheduler 1", 1, 7, inbox)
    if not is_late:
        pair.answer(first)
    assert await pair.heard(1) == LoadLoraReq(RESTORED, 1, "/old", at_once=True)
    joined = await pair.heard(1)
    assert (joined.lora_id, joined.path) == (first.lora_id, "/new")
    assert not loading.done()
    pair.answer(joined)
    await loading
    assert pair.manager.adapters.names == ["old", "new"]


async def test_an_adapter_keeps_the_files_that_it_was_loaded_from(pair):
    loading = pair.load("new")
    for asked, fingerprint in zip(await pair.both_hear(), ("one", "another"), strict=True):
        assert asked.fingerprint == "", "it may be any"
        pair.from_engine.send(LoraReply(asked.id, asked.lora_id, fingerprint=fingerprint))
    for undone in await pair.both_hear():
        pair.answer(undone)
    with pytest.raises(RequestError, match="changed while it was being loaded"):
        await loading

    loading = pair.load("new")
    for asked in await pair.both_hear():
        pair.from_engine.send(LoraReply(asked.id, asked.lora_id, fingerprint="one"))
    await loading
    pair.manager.parts.down("scheduler 1", 1)
    pair.inboxes[1] = LocalQueue()
    pair.manager.parts.up("scheduler 1", 1, 7, pair.inboxes[1])
    assert [(await pair.heard(1)).fingerprint for _ in range(2)] == ["", "one"]


async def test_a_load_under_which_all_die_has_not_been(pair):
    loading = pair.load("new")
    await pair.both_hear()
    for replica in (0, 1):
        pair.manager.parts.down(f"scheduler {replica}", replica)
    with pytest.raises(CapacityError):
        await loading
    assert pair.manager.adapters.names == ["old"]


async def test_requests_follow_their_adapter_into_a_new_life(pair):
    loading = pair.load("new")
    asked, other = await pair.both_hear()
    pair.answer(asked)
    pair.answer(other)
    await loading
    call = pair.call("r", "new", replica=1)
    first = await pair.heard(1)
    assert isinstance(first, TokenizedGenerateReqInput)
    assert first.lora_id == asked.lora_id
    pair.manager.parts.down("scheduler 1", 1)
    inbox = pair.inboxes[1] = LocalQueue()
    pair.manager.parts.up("scheduler 1", 1, 7, inbox)

    restored = [await pair.heard(1), await pair.heard(1)]
    again = await pair.heard(1)

    assert restored == [
        LoadLoraReq(RESTORED, 1, "/old", at_once=True),
        LoadLoraReq(RESTORED, asked.lora_id, "/new", at_once=True),
    ]
    assert isinstance(again, TokenizedGenerateReqInput)
    assert (again.lora_id, again.namespace, again.attempt) == (first.lora_id, first.namespace, 1)
    pair.end("r", 7)
    await call


async def test_an_adapter_that_a_new_life_cannot_read_leaves_the_others_and_is_asked_for_again(pair):
    pair.manager.parts.down("scheduler 1", 1)
    inbox = pair.inboxes[1] = LocalQueue()
    pair.manager.parts.up("scheduler 1", 1, 7, inbox)
    restored = await pair.heard(1)
    assert isinstance(restored, LoadLoraReq)
    pair.answer(restored, 400)
    assert await pair.both_hear() == (UnloadLoraReq(RESTORED, 1),) * 2

    call = pair.call("r", "old", replica=0)
    first, second = await pair.both_hear()
    assert isinstance(first, LoadLoraReq)
    assert (first.lora_id, first.path, first.at_once) == (2, "/old", False)
    pair.answer(first)
    pair.answer(second, 400)
    for undone in await pair.both_hear():
        pair.answer(undone)
    with pytest.raises(RequestError, match="'old' cannot be loaded: no good"):
        await call


async def test_no_replica_is_asked_while_none_is_live(pair):
    for replica in (0, 1):
        pair.manager.parts.down(f"scheduler {replica}", replica)
    with pytest.raises(CapacityError):
        await pair.manager.adapters.load("new", "/new")
    with pytest.raises(NotFoundError):
        await pair.call("r", "new")
