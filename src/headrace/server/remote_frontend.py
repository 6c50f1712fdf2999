"""The front end in an HTTP worker (--tokenizer-worker-num): a proxy whose methods run in the main process.

Owns the calls of this worker that are under way, and the last news. Does not own requests or limits: the main process does, for all workers.
Nor what the methods are: the Protocols of `request_frontend` are. The other side is `frontend/front_door.py`. Runs in the worker's event loop.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import msgspec

from headrace.errors import HeadraceError
from headrace.frontend.front_door import WireCaller
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.tenants import Caller
from headrace.messages.channel import Message, Receiver, Sender
from headrace.messages.control import ShutdownReq
from headrace.messages.front import (
    FrontCall,
    FrontCancel,
    FrontEnd,
    FrontNews,
    FrontOutput,
    FrontReplies,
    FrontTaken,
)
from headrace.messages.operations import error_of_fault
from headrace.messages.requests import GenerateReqInput
from headrace.server.request_frontend import METHODS, PARTS, RequestFrontend

TAKEN_AT_ONCE = 4
"""After this many outputs of a stream, the main process is told that they were consumed; half of its window."""


class _Results:
    """What has arrived for one call. error: why nothing more will."""

    __slots__ = ("ended", "error", "outputs", "wake")

    def __init__(self) -> None:
        self.outputs: deque[bytes] = deque()
        self.ended = False
        self.error: HeadraceError | None = None
        self.wake = asyncio.Event()


class RemoteCalls:
    """How calls cross, and what comes back.

    worker: its number. news: the last that was heard. on_news: set by the owner; called with the previous and the new news. on_shutdown: set
    by the owner; called when the worker is to stop.
    """

    def __init__(self, worker: int, sender: Sender, receiver: Receiver) -> None:
        self.news = FrontNews([], "default", accepting=False, log_level="")
        self.on_news: Callable[[FrontNews, FrontNews], None] = lambda before, news: None
        self.on_shutdown: Callable[[], None] = lambda: None
        self._worker = worker
        self._sender = sender
        self._receiver = receiver
        self._ids = itertools.count(1)
        self._calls: dict[int, _Results] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = {name: msgspec.msgpack.Decoder(method.result) for name, method in METHODS.items()}
        self._told = asyncio.Event()

    def start(self) -> None:
        """Receive messages in the running event loop."""
        self._receiver.listen(self._handle)

    def _handle(self, message: Message) -> None:
        match message:
            case FrontReplies(replies):
                for reply in replies:
                    self._take(reply)
            case FrontNews() as news:
                before, self.news = self.news, news
                self.on_news(before, news)
                self._told.set()
            case ShutdownReq():
                self.on_shutdown()

    async def wait_for_news(self) -> None:
        """Wait until the main process has been heard."""
        await self._told.wait()

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the main process's front end. Returns its result, raises its error."""
        call_id, results = self._send(method, arguments)
        try:
            await results.wake.wait()
        finally:
            self._leave(call_id, results)
        if results.error is not None:
            raise results.error
        return self._decoders[method].decode(results.outputs[0])

    async def stream(self, method: str, arguments: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Call a method that yields many results. Closing the generator early ends the call there, too."""
        decode = self._decoders[method].decode
        call_id, results = self._send(method, arguments)
        num_untold = 0
        try:
            while True:
                while results.outputs:
                    yield decode(results.outputs.popleft())
                    num_untold += 1
                    if num_untold == TAKEN_AT_ONCE:
                        self._sender.send(FrontTaken(self._worker, call_id, num_untold))
                        num_untold = 0
                if results.error is not None:
                    raise results.error
                if results.ended:
                    return
                results.wake.clear()
                await results.wake.wait()
        finally:
            self._leave(call_id, results)

    def tell(self, method: str, **arguments: Any) -> None:
        """Call a method without waiting for its result."""
        self._sender.send(FrontCall(self._worker, next(self._ids), method, self._encoder.encode(arguments)))

    def _send(self, method: str, arguments: dict[str, Any]) -> tuple[int, _Results]:
        call_id, results = next(self._ids), _Results()
        self._calls[call_id] = results
        self._sender.send(FrontCall(self._worker, call_id, method, self._encoder.encode(arguments)))
        return call_id, results

    def _leave(self, call_id: int, results: _Results) -> None:
        del self._calls[call_id]
        if not results.ended:
            self._sender.send(FrontCancel(self._worker, call_id))

    def _take(self, reply: FrontOutput | FrontEnd) -> None:
        results = self._calls.get(reply.id)
        if results is None:
            return
        if isinstance(reply, FrontOutput):
            results.outputs.append(reply.value)
        else:
            results.ended = True
            if reply.fault is not None:
                results.error = error_of_fault(reply.fault)
            elif reply.value:
                results.outputs.append(reply.value)
        results.wake.set()


_FROM_NEWS: dict[str, Callable[[FrontNews], Any]] = {
    "adapters.names": lambda news: news.adapters,
    "weights.version": lambda news: news.weight_version,
    "weights.model_path": lambda news: news.model_path,
}
"""Properties of the parts, which are answered from what was last heard."""


def remote_frontend(calls: RemoteCalls) -> RequestFrontend:
    """The front end whose methods are `calls`."""
    return cast("RequestFrontend", _RemoteFrontend(calls))


class _Remote:
    """An object of the main process, or one of its parts: each method of its Protocol is a call. prefix: of the methods' names."""

    def __init__(self, calls: RemoteCalls, prefix: str = "") -> None:
        self._calls = calls
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        path = self._prefix + name
        if path in _FROM_NEWS:
            return _FROM_NEWS[path](self._calls.news)
        if path not in METHODS:
            raise AttributeError(path)
        method = METHODS[path]

        def call(*values: object, **named: object) -> Any:
            given = dict(zip(method.arguments.__struct_fields__, values, strict=False)) | named
            sent = {key: WireCaller.of(value) if isinstance(value, Caller) else value for key, value in given.items()}
            if method.streams:
                return self._calls.stream(path, sent)
            return self._calls.call(path, **sent) if method.replies else self._calls.tell(path, **sent)

        return call


class _RemoteFrontend(_Remote):
    """The front end with its parts."""

    def __init__(self, calls: RemoteCalls) -> None:
        super().__init__(calls)
        for part in PARTS:
            setattr(self, part, _Remote(calls, f"{part}."))

    def generate_request(self, obj: GenerateReqInput, **options: Any) -> AsyncGenerator[SampleUpdate, None]:
        """See `RequestFrontend`. Raises RequestError."""
        updates: AsyncGenerator[SampleUpdate, None] = self.__getattr__("generate_request")(_sendable(obj), **options)
        return updates


def _sendable(obj: GenerateReqInput) -> GenerateReqInput:
    """The call as a message can hold it, whatever its schemas are. Raises RequestError."""
    given = obj.sampling_params
    if given is None:
        return obj
    sent = [one.with_json_as_text() for one in given] if isinstance(given, list) else given.with_json_as_text()
    return msgspec.structs.replace(obj, sampling_params=sent)
