"""The server's view of the front end, and its proxy.

The front end is the `TokenizerManager` if the server runs in the main process. In an HTTP worker (--tokenizer-worker-num) it is a proxy whose
methods (`METHODS`) run in the main process, which owns requests and limits for all workers. The other side of the proxy is
`frontend/front_door.py`.
"""

import asyncio
import inspect
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import msgspec

from headrace.errors import HeadraceError
from headrace.frontend.adapters import Adapters
from headrace.frontend.control import Control
from headrace.frontend.front_door import WireCaller, remote_method
from headrace.frontend.pins import PinAsk, Pins
from headrace.frontend.records import Records
from headrace.frontend.runtime_settings import RuntimeSettings
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.slots import Slots
from headrace.frontend.tenants import Caller
from headrace.frontend.weight_control import WeightControl
from headrace.media_kinds import MediaRefs
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
from headrace.messages.requests import EmbeddingReqInput, GenerateReqInput


class RequestFrontend(Protocol):
    """What the server needs of the TokenizerManager; of its parts, see `PARTS`. Results are awaited, since they may come from another process."""

    def generate_request(
        self,
        obj: GenerateReqInput,
        *,
        default_max_new_tokens: int = ...,
        in_chat: bool = ...,
        caller: Caller = ...,
        pins: Sequence[PinAsk] = ...,
        slot: int = ...,
    ) -> AsyncGenerator[SampleUpdate, None]:
        """Yields the new output of the samples of one call. Without `stream`, one update per sample in prompt-major order, once all have ended.

        default_max_new_tokens: used if the request sets none; limited to the room in the context. in_chat: the prompt is a rendered chat.
        caller: its limits apply. pins: of the call's prompt. slot: see `Slots`. Closing the generator early aborts what is unfinished.
        Raises RequestError, CapacityError, ExecutionError.
        """

    def encode_request(self, obj: EmbeddingReqInput, *, caller: Caller = ...) -> AsyncGenerator[SampleUpdate, None]:
        """Yields one update of each input, in order, once all have ended; its `pooled` is None if the input failed.

        caller: its limits apply. Closing the generator early aborts what is unfinished. Raises RequestError, CapacityError, ExecutionError.
        """

    async def ids_with_media(self, input_ids: list[int], media: MediaRefs, caller: Caller = ...) -> list[int]:
        """The tokens of a prompt with those of media in place of their tokens. caller: whose media they are. Raises RequestError."""

    def abort_request(self, rid: str = "", abort_all: bool = False, caller: Caller = ...) -> None:
        """Abort the caller's samples of `rid`, or all; unknown rids are ignored."""

    async def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        timeout_s: float | None = None,
        caller: Caller = ...,
    ) -> str:
        """Open a session and return its id. Raises RequestError, CapacityError."""

    async def close_session(self, session_id: str, caller: Caller = ...) -> None:
        """Close a session of the caller, or for an admin any session. Raises NotFoundError."""

    async def health(self, generate: bool = False) -> bool:
        """Whether the engine is alive and, with `generate`, can generate a token. Raises CapacityError when it awaits weights."""

    @property
    def adapters(self) -> Adapters: ...

    @property
    def control(self) -> Control:
        """Caches, counters and profiles of the schedulers."""

    @property
    def pins(self) -> Pins:
        """Pinned prefixes, and what is cached."""

    @property
    def records(self) -> Records:
        """Timelines and dumps of recent requests."""

    @property
    def settings(self) -> RuntimeSettings: ...

    @property
    def slots(self) -> Slots: ...

    @property
    def weights(self) -> WeightControl:
        """Operations on weights, generation and memory."""

    async def counters(self) -> dict[str, int]: ...

    async def metrics_text(self) -> bytes:
        """Every metric, in Prometheus' text format."""

    def count_reply(self, route: str, status: int) -> None:
        """Count an HTTP reply for the metrics. route: the declared path, not the one that was sent."""

    def count_template_kill(self) -> None:
        """Count a process that was lost while it rendered a chat template."""


PARTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "adapters": (Adapters.load, Adapters.unload),
    "control": (Control.ask, Control.flush_cache, Control.internal_states, Control.inject_fault),
    "pins": (Pins.pin, Pins.unpin, Pins.cache),
    "records": (Records.timelines, Records.latest),
    "slots": (Slots.save, Slots.restore, Slots.erase),
    "settings": (RuntimeSettings.changed_options,),
    "weights": (WeightControl.operate,),
}
"""What a server calls of the parts of a `RequestFrontend`, and nothing else: an HTTP worker has only these, and the properties in `_FROM_NEWS`."""

METHODS = {
    name: remote_method(member)
    for name, member in vars(RequestFrontend).items()
    if name[0] != "_" and inspect.isfunction(member)
} | {f"{part}.{function.__name__}": remote_method(function) for part, called in PARTS.items() for function in called}
"""Every method that an HTTP worker can call in the main process, by name."""


TAKEN_AT_ONCE = 4
"""After this many outputs of a stream, the main process is told that they were consumed; half of its window."""


@dataclass(slots=True)
class _Results:
    """What has arrived for one call. error: why nothing more will."""

    outputs: deque[bytes] = field(default_factory=deque)
    ended: bool = False
    error: HeadraceError | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)


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
    """An object of the main process, or one of its parts: each of its `METHODS` is a call. prefix: of the methods' names."""

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
