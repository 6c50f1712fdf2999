"""The front end's methods from another process: what a worker gets is what the main process would have given."""

import asyncio
import operator
import re
from contextlib import aclosing, asynccontextmanager

import pytest
from fake_frontend import FakeFrontend, Script

from headrace.errors import (
    AuthError,
    CapacityError,
    ContextLengthError,
    ExecutionError,
    ForbiddenError,
    LateError,
    NotFoundError,
    RequestError,
    TooLargeError,
)
from headrace.frontend.front_door import WINDOW, FrontDoor
from headrace.frontend.tenants import Caller, Tenant, TenantLimits
from headrace.messages.channel import LocalQueue
from headrace.messages.control import ShutdownReq
from headrace.messages.front import FrontCall, FrontNews
from headrace.messages.requests import GenerateReqInput
from headrace.messages.weights import ContinueGeneration
from headrace.metrics.export import render
from headrace.sampling.params import SamplingParams
from headrace.server.http import describe_error
from headrace.server.request_frontend import METHODS, PARTS, RemoteCalls, RequestFrontend, remote_frontend


class House:
    """A main process with a fake front end, and workers around it, all in one loop."""

    def __init__(self) -> None:
        self.frontend = FakeFrontend()
        self.tenants = {"ann": Tenant(TenantLimits(name="ann"))}
        self.to_front = LocalQueue()
        self.accepting = True
        self.door = FrontDoor(self.frontend, METHODS, self.to_front, self._news, self.tenants.get)
        self.task = asyncio.create_task(self.door.run())

    def _news(self) -> FrontNews:
        return FrontNews(list(self.frontend.adapters.names), self.frontend.weights.version, self.accepting, "info")

    async def worker(self, number: int) -> RequestFrontend:
        queue = LocalQueue()
        calls = RemoteCalls(number, self.to_front, queue)
        calls.start()
        self.door.add(number, queue)
        await calls.wait_for_news()
        remote = remote_frontend(calls)
        remote.calls, remote.queue = calls, queue
        return remote


@asynccontextmanager
async def house():
    made = House()
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def updates_of(frontend, **fields):
    call = GenerateReqInput(text="hi", rid="r", sampling_params=SamplingParams(max_new_tokens=9), **fields)
    async with aclosing(frontend.generate_request(call)) as updates:
        return [update async for update in updates]


async def updates_with(frontend, sampling):
    text = ["a", "b"] if isinstance(sampling, list) else "a"
    async with aclosing(frontend.generate_request(GenerateReqInput(text=text, sampling_params=sampling))) as updates:
        return [update async for update in updates]


async def until(condition):
    """Turns of the loop until it holds; the test's own limit ends what never does."""
    while not condition():  # noqa: ASYNC110, what is waited for has no event
        await asyncio.sleep(0)


def test_every_member_of_the_front_end_crosses():
    remote = remote_frontend(RemoteCalls(0, LocalQueue(), LocalQueue()))
    for name in [*METHODS, "adapters.names", "weights.version", "weights.model_path"]:
        operator.attrgetter(name)(remote)
    for side in (remote, *(getattr(remote, name) for name in PARTS)):
        with pytest.raises(AttributeError):
            side.no_such_method  # noqa: B018, the access is the point
    members = {name: value for name, value in vars(RequestFrontend).items() if name[0] != "_"}
    assert set(members) == {*PARTS, *(name for name in METHODS if "." not in name)}
    assert set(PARTS) == {name for name, value in members.items() if isinstance(value, property)}


@pytest.mark.parametrize("stream", [False, True])
async def test_updates_are_those_of_the_front_end(stream):
    async with house() as home:
        remote = await home.worker(0)

        assert await updates_of(remote, stream=stream) == await updates_of(home.frontend, stream=stream)
        assert home.frontend.calls[0] == home.frontend.calls[1]
        await until(lambda: home.door.num_calls == 0)


@pytest.mark.parametrize("field", ["json_schema", "structural_tag"])
async def test_a_schema_that_is_nested_too_deeply_for_a_message_is_a_refusal(field):
    deep = {}
    for _ in range(5000):
        deep = {"format": deep}
    async with house() as home:
        remote = await home.worker(0)
        calls = [SamplingParams(**{field: deep}), [SamplingParams(), SamplingParams(**{field: deep})]]
        for sampling in calls:
            with pytest.raises(RequestError, match="nested too deeply") as caught:
                await updates_with(remote, sampling)
            assert caught.value.param == field
        await until(lambda: home.door.num_calls == 0)


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": {"b": 2**70, "a": [None, 1.5]}},
        {"json_schema": True},
        {"json_schema": {}},
        {"json_schema": '{"b": 1}'},
        {"structural_tag": {"format": {"type": "any_text"}}},
        {"choice": ["a", "b"]},
        {},
    ],
)
async def test_a_grammar_is_that_of_the_front_end(params):
    async with house() as home:
        remote = await home.worker(0)
        for frontend in (remote, home.frontend):
            await updates_with(frontend, SamplingParams(**params))
        here, there = home.frontend.resolved
        assert here.grammar == there.grammar


@pytest.mark.parametrize(
    "error",
    [
        RequestError("wrong", "text", "bad"),
        ContextLengthError.of_prompt("text", 8, 9),
        NotFoundError("none", "model", "model_not_found"),
        AuthError("who?"),
        ForbiddenError("no"),
        LateError("late"),
        TooLargeError("large"),
        CapacityError("full", 3.5),
        CapacityError("yours", 2.0, 429, "tokens"),
        ExecutionError("broken"),
    ],
)
@pytest.mark.parametrize("at", [0, 2])
async def test_errors_are_answered_the_same(error, at):
    async with house() as home:
        remote = await home.worker(0)
        home.frontend.script = Script(fail_at=at, error=error)

        with pytest.raises(Exception) as raised:
            await updates_of(remote, stream=True)

        assert describe_error(raised.value) == describe_error(error)
        assert isinstance(raised.value, type(error)) or isinstance(error, ContextLengthError)


async def test_a_fault_of_ours_is_not_described(caplog):
    async with house() as home:
        remote = await home.worker(0)
        home.frontend.script = Script(fail_at=0, error=ZeroDivisionError("secret"))

        with pytest.raises(ExecutionError, match=r"internal error; see the server's log"):
            await updates_of(remote)


async def test_a_client_that_leaves_ends_the_call():
    async with house() as home:
        remote = await home.worker(0)
        home.frontend.script = Script(hold_at=2)
        call = GenerateReqInput(text="hi", stream=True, sampling_params=SamplingParams(max_new_tokens=9))

        async with aclosing(remote.generate_request(call)) as updates:
            await anext(updates)
        await until(home.frontend.closed_early.is_set)

        await until(lambda: home.door.num_calls == 0)


async def test_a_slow_client_holds_only_its_own_updates_back():
    async with house() as home:
        remote = await home.worker(0)
        home.frontend.script = Script(text="x" * 100)
        call = GenerateReqInput(text="hi", stream=True, sampling_params=SamplingParams(max_new_tokens=100))

        async with aclosing(remote.generate_request(call)) as slow:
            first = await anext(slow)
            await updates_of(remote, stream=True)
            [results] = remote.calls._calls.values()
            assert len(results.outputs) < WINDOW
            rest = [update async for update in slow]

    assert [len(update.ids) for update in (first, *rest)] == [1] * 100


async def test_a_worker_that_ends_takes_its_own_calls_with_it_and_is_not_heard_again():
    async with house() as home:
        one, other = await home.worker(0), await home.worker(1)
        home.frontend.script = Script(hold_at=1)
        calls = [asyncio.create_task(updates_of(remote, stream=True)) for remote in (one, other)]
        await until(lambda: home.frontend.num_active == 2)

        home.door.remove(0)
        await until(lambda: home.frontend.num_active == 1)
        home.to_front.send(FrontCall(0, 99, "control.flush_cache", b"\x80"))
        assert (await other.control.flush_cache()).success

        assert home.door.num_calls == 1
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: home.door.num_calls == 0)


async def test_the_replies_of_all_workers_are_counted_in_one_place():
    async with house() as home:
        one, other = await home.worker(0), await home.worker(1)

        one.count_reply("/health", 200)
        other.count_reply("/generate", 503)
        other.count_template_kill()
        await until(lambda: len(home.frontend.replies) == 2)
        assert sorted(home.frontend.replies) == [("/generate", 503), ("/health", 200)]
        lost = re.compile(rb"^headrace:template_kills_total\{.*\} 1\.0$", re.MULTILINE)
        await until(lambda: lost.search(render(home.frontend.metrics)))


async def test_what_one_worker_changes_the_others_know():
    async with house() as home:
        one, other = await home.worker(0), await home.worker(1)

        await one.adapters.load("new", "path")
        assert one.adapters.names == ["new"], "news come before the reply"
        await until(lambda: other.adapters.names == ["new"])
        home.frontend.weights.version = "two"
        await one.weights.operate(ContinueGeneration())
        await until(lambda: (one.weights.version, other.weights.version) == ("two", "two"))


async def test_callers_are_known_by_the_name_of_their_key():
    async with house() as home:
        remote = await home.worker(0)
        await remote.open_session(caller=Caller(Tenant(TenantLimits(name="ann")), is_admin=True))
        assert home.frontend.asked_by[-1][1] == Caller(home.tenants["ann"], is_admin=True)
        await remote.open_session(caller=Caller(address="@192.0.2.1"))
        assert home.frontend.asked_by[-1][1].turn == "@192.0.2.1"

        with pytest.raises(AuthError, match="no longer accepted"):
            await remote.open_session(caller=Caller(Tenant(TenantLimits(name="gone"))))


async def test_malformed_calls_are_refused_and_hurt_nobody():
    async with house() as home:
        remote = await home.worker(0)
        _, results = remote.calls._send("nonsense", {})
        await results.wake.wait()

        assert isinstance(results.error, RequestError)
        with pytest.raises(ExecutionError):
            await remote.calls.call("adapters.load", name=5, path="p")
        assert await remote.health() is True


async def test_a_worker_that_is_told_to_leave_says_so():
    async with house() as home:
        remote = await home.worker(0)
        left = asyncio.Event()
        remote.calls.on_shutdown = left.set
        remote.queue.send(ShutdownReq())
        await left.wait()
