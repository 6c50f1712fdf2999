"""Receives the calls of HTTP workers (--tokenizer-worker-num) in the main process.

Owns the calls in progress: each is a task that calls a method of the front end and sends back its results. The outputs of a stream wait
here for a slow worker, as they would for a slow client, so that the front end merges later ones. Does not own requests, limits or the
engine: the `TokenizerManager` does, for all workers. Runs in the main process's event loop, except where noted.

    HTTP worker 0 ──FrontCall──┐                                  ┌─> TokenizerManager ── engine
    HTTP worker 1 ──FrontCall──┴─> FrontDoor ── a task for each ──┘
                 <──FrontReplies, one message a turn of the loop──
"""

import asyncio
import inspect
import operator
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self, get_args, get_origin, get_type_hints

import msgspec

from headrace.errors import AuthError, RequestError
from headrace.frontend.tenants import Caller, Tenant
from headrace.messages.channel import Message, Receiver, Sender
from headrace.messages.front import (
    FrontCall,
    FrontCancel,
    FrontEnd,
    FrontNews,
    FrontOutput,
    FrontReplies,
    FrontTaken,
)
from headrace.messages.operations import fault_of
from headrace.turns import note_size, work_for


class WireCaller(msgspec.Struct, frozen=True):
    """A `Caller` in a message: the main process finds its tenant by name."""

    tenant: str | None = None
    traceparent: str = ""
    is_admin: bool = False
    address: str = ""

    @classmethod
    def of(cls, caller: Caller) -> Self:
        name = caller.tenant.name if caller.tenant is not None else None
        return cls(name, caller.traceparent, caller.is_admin, caller.address)


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    """One remote method. arguments: a struct of the given ones. result: its type. streams: the method yields many results.

    replies: it is awaited; False = its result is not waited for.
    """

    arguments: type[msgspec.Struct]
    result: Any
    streams: bool
    replies: bool


def remote_method(function: Callable[..., Any]) -> RemoteMethod:
    hints = get_type_hints(function)
    result = hints["return"]
    streams = get_origin(result) is AsyncGenerator
    result = get_args(result)[0] if streams else result
    return RemoteMethod(_arguments(function, hints), result, streams, inspect.iscoroutinefunction(function))


def _arguments(function: Callable[..., Any], hints: dict[str, Any]) -> type[msgspec.Struct]:
    fields: list[tuple[str, Any, Any]] = []
    for name in inspect.signature(function).parameters:
        if name == "self":
            continue
        kind = WireCaller if hints[name] is Caller else hints[name]
        # Arguments that were not given are left to the method's own defaults.
        fields.append((name, kind | msgspec.UnsetType, msgspec.UNSET))
    title = "".join(word.capitalize() for word in function.__name__.split("_"))
    return msgspec.defstruct(f"{title}Arguments", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


WINDOW = 8
"""Most outputs of a stream that are sent to a worker and not yet consumed there."""

NEWS_S = 0.5
"""Seconds between checks for news that no call has caused."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call in progress. room: how many outputs of a stream may still be sent."""

    room: int = WINDOW
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def taken(self, count: int) -> None:
        self.room += count
        self.wake.set()

    async def use_room(self) -> None:
        """Count one sent output; returns when the next one may be sent."""
        self.room -= 1
        while self.room <= 0:
            self.wake.clear()
            await self.wake.wait()

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


@dataclass(slots=True, eq=False)
class _Worker:
    """One incarnation of a worker. waiting: replies of this turn of the loop. news: the last ones sent to it."""

    sender: Sender
    calls: dict[int, _Call] = field(default_factory=dict)
    waiting: list[FrontOutput | FrontEnd] = field(default_factory=list)
    news: FrontNews | None = None


@dataclass(eq=False)
class FrontDoor:
    """frontend: the object whose methods are called. methods: by name (`weights.operate` is one of an attribute). receiver: calls of all
    workers. make_news: the current state for workers. find_tenant: by the name that a worker sends.
    """

    frontend: object
    methods: dict[str, RemoteMethod]
    receiver: Receiver
    make_news: Callable[[], FrontNews]
    find_tenant: Callable[[str], Tenant | None]
    _workers: dict[int, _Worker] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def num_calls(self) -> int:
        return sum(len(worker.calls) for worker in self._workers.values())

    def add(self, number: int, sender: Sender) -> None:
        """Add a worker. number: of this incarnation, never reused."""
        self._workers[number] = _Worker(sender)
        self.tell_news()

    def remove(self, number: int) -> None:
        """Remove a worker and abort its calls. Unknown numbers are ignored."""
        worker = self._workers.pop(number, None)
        if worker is not None:
            for call in worker.calls.values():
                call.cancel()
            worker.sender.close()

    def tell_news(self) -> None:
        news = self.make_news()
        for worker in self._workers.values():
            if worker.news != news:
                worker.news = news
                worker.sender.send(news)

    async def run(self) -> None:
        """Take calls and tell news until cancelled; then abort the calls in progress."""
        self.receiver.listen(self._handle)
        try:
            while True:
                self.tell_news()
                await asyncio.sleep(NEWS_S)
        finally:
            for number in list(self._workers):
                self.remove(number)

    def _handle(self, message: Message) -> None:
        if not isinstance(message, FrontCall | FrontTaken | FrontCancel):
            return
        worker = self._workers.get(message.worker)
        if worker is None:
            return  # from an incarnation that has ended
        if isinstance(message, FrontCall):
            self._begin(worker, message)
        elif (call := worker.calls.get(message.id)) is None:
            return
        elif isinstance(message, FrontTaken):
            call.taken(message.count)
        else:
            call.cancel()

    def _begin(self, worker: _Worker, message: FrontCall) -> None:
        call = worker.calls[message.id] = _Call()
        call.task = asyncio.get_running_loop().create_task(self._carry_out(worker, call, message))
        call.task.add_done_callback(lambda _: worker.calls.pop(message.id, None))

    async def _carry_out(self, worker: _Worker, call: _Call, message: FrontCall) -> None:
        try:
            method = self.methods.get(message.method)
            if method is None:
                raise RequestError(f"the front end has no method {message.method!r:.40}")
            arguments = self._arguments(method, message.arguments)
            for caller in arguments.values():
                if isinstance(caller, Caller):
                    work_for(caller.turn, caller.weight)
            note_size(len(message.arguments))
            bound = operator.attrgetter(message.method)(self.frontend)
            if method.streams:
                await self._stream(worker, call, message.id, bound(**arguments))
                end = FrontEnd(message.id)
            else:
                result = bound(**arguments)
                end = FrontEnd(
                    message.id, self._encoder.encode(await result if inspect.isawaitable(result) else result)
                )
        except Exception as error:
            end = FrontEnd(message.id, fault=fault_of(error))
        self.tell_news()
        self._reply(worker, end)

    async def _stream(self, worker: _Worker, call: _Call, call_id: int, outputs: AsyncGenerator[object, None]) -> None:
        async with aclosing(outputs):
            async for output in outputs:
                self._reply(worker, FrontOutput(call_id, self._encoder.encode(output)))
                await call.use_room()

    def _arguments(self, method: RemoteMethod, packed: bytes) -> dict[str, object]:
        given = msgspec.structs.asdict(msgspec.msgpack.decode(packed, type=method.arguments))
        return {
            name: self._caller(value) if isinstance(value, WireCaller) else value
            for name, value in given.items()
            if value is not msgspec.UNSET
        }

    def _caller(self, caller: WireCaller) -> Caller:
        tenant = self.find_tenant(caller.tenant) if caller.tenant is not None else None
        if caller.tenant is not None and tenant is None:
            raise AuthError("the key is no longer accepted")
        return Caller(tenant, caller.traceparent, caller.is_admin, address=caller.address)

    def _reply(self, worker: _Worker, reply: FrontOutput | FrontEnd) -> None:
        """Add a reply to the message that is sent at the end of this turn of the loop, one for all streams of a step."""
        if not worker.waiting:
            asyncio.get_running_loop().call_soon(self._flush, worker)
        worker.waiting.append(reply)

    @staticmethod
    def _flush(worker: _Worker) -> None:
        replies, worker.waiting = worker.waiting, []
        worker.sender.send(FrontReplies(replies))
