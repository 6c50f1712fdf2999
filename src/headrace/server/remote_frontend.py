"""The front end as an HTTP worker sees it (--tokenizer-worker-num): every call crosses to the main process and back.

Owns the calls of this worker and what it has been told without asking. Does not own requests or limits: the main process does, for all
workers. Runs in the worker's event loop.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

import msgspec

from headrace.errors import ExecutionError, HeadraceError
from headrace.frontend.remote_methods import WireCaller, error_of_fault, remote_methods
from headrace.frontend.runtime_settings import LimitChanges, Limits, LogLevel
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.tenants import NOBODY, Caller
from headrace.messages.channel import Receiver, Sender
from headrace.messages.control import FaultReq, FlushCacheReply, InternalState, ShutdownReq
from headrace.messages.front import (
    FrontCall,
    FrontCancel,
    FrontEnd,
    FrontNews,
    FrontOutput,
    FrontReplies,
    FrontTaken,
)
from headrace.messages.requests import GenerateReqInput
from headrace.messages.weights import WeightOperation, WeightOpReply
from headrace.server.request_frontend import (
    AdaptersFrontend,
    ControlFrontend,
    ExpertsFrontend,
    RecordsFrontend,
    RequestFrontend,
    SettingsFrontend,
    WeightFrontend,
)

PARTS: dict[str, type] = {
    "adapters": AdaptersFrontend,
    "control": ControlFrontend,
    "experts": ExpertsFrontend,
    "records": RecordsFrontend,
    "settings": SettingsFrontend,
    "weights": WeightFrontend,
}
"""What a `RequestFrontend` holds, by name."""

METHODS = remote_methods(RequestFrontend) | {
    f"{part}.{name}": method for part, protocol in PARTS.items() for name, method in remote_methods(protocol).items()
}
"""What crosses, by the name that a call gives."""

_UPDATES = msgspec.msgpack.Decoder(SampleUpdate)

TAKEN_AT_ONCE = 4
"""The main process is told of outputs that were taken when there are so many: half of its window."""


class _Results:
    """What has come for one call. error: why nothing more comes."""

    __slots__ = ("ended", "error", "outputs", "wake")

    def __init__(self) -> None:
        self.outputs: deque[bytes] = deque()
        self.ended = False
        self.error: HeadraceError | None = None
        self.wake = asyncio.Event()


class RemoteFrontend:
    """See the module's text; the methods are those of `RequestFrontend`.

    worker: its number. on_news: set by the owner; told of what was known before and is known now. on_shutdown: the worker is to leave.
    """

    def __init__(self, worker: int, sender: Sender, receiver: Receiver) -> None:
        self.adapters = RemoteAdapters(self)
        self.control = RemoteControl(self)
        self.experts = RemoteExperts(self)
        self.records = RemoteRecords(self)
        self.settings = RemoteSettings(self)
        self.weights = RemoteWeights(self)
        self.news = FrontNews([], "default", accepting=False, log_level="")
        self._worker = worker
        self._sender = sender
        self._receiver = receiver
        self._ids = itertools.count(1)
        self._calls: dict[int, _Results] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._told = asyncio.Event()
        self.on_news: Callable[[FrontNews, FrontNews], None] = lambda before, news: None
        self.on_shutdown: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Take what comes, until cancelled."""
        while True:
            match await self._receiver.arecv():
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
        """Until the main process has been heard."""
        await self._told.wait()

    # -- one call

    async def call(self, method: str, **arguments: Any) -> Any:
        """The result of a method of the main process's front end. Raises what it raises."""
        call_id, results = self._send(method, arguments)
        try:
            await results.wake.wait()
        finally:
            self._leave(call_id, results)
        if results.error is not None:
            raise results.error
        return msgspec.msgpack.decode(results.outputs[0], type=METHODS[method].result)

    async def generate_request(
        self,
        obj: GenerateReqInput,
        *,
        default_max_new_tokens: int = -1,
        caller: Caller | None = None,
    ) -> AsyncGenerator[SampleUpdate, None]:
        """See `RequestFrontend`. default_max_new_tokens: -1 = the main process's."""
        arguments: dict[str, Any] = {"obj": obj}
        if default_max_new_tokens >= 0:
            arguments["default_max_new_tokens"] = default_max_new_tokens
        if caller is not None:
            arguments["caller"] = WireCaller.of(caller)
        call_id, results = self._send("generate_request", arguments)
        num_untold = 0
        try:
            while True:
                while results.outputs:
                    yield _UPDATES.decode(results.outputs.popleft())
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

    def fail_all(self, message: str) -> None:
        """Every caller gets an ExecutionError."""
        for results in self._calls.values():
            results.ended, results.error = True, ExecutionError(message)
            results.wake.set()

    def _tell(self, method: str, **arguments: Any) -> None:
        """Call a method whose result nobody waits for."""
        self._sender.send(FrontCall(self._worker, next(self._ids), method, self._encoder.encode(arguments)))

    # -- methods of the main process's front end; see `RequestFrontend`

    def abort_request(self, rid: str = "", abort_all: bool = False, caller: Caller = NOBODY) -> None:
        """The waiters get what there is."""
        self._tell("abort_request", rid=rid, abort_all=abort_all, caller=WireCaller.of(caller))

    async def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        timeout_s: float | None = None,
        caller: Caller = NOBODY,
    ) -> str:
        """Raises RequestError, CapacityError."""
        given = {"capacity_of_str_len": capacity_of_str_len, "session_id": session_id, "timeout_s": timeout_s}
        session: str = await self.call("open_session", **given, caller=WireCaller.of(caller))
        return session

    async def close_session(self, session_id: str, caller: Caller = NOBODY) -> None:
        """Raises NotFoundError."""
        await self.call("close_session", session_id=session_id, caller=WireCaller.of(caller))

    async def health(self, generate: bool = False) -> bool:
        """False, too, when the main process does not answer."""
        alive: bool = await self.call("health", generate=generate)
        return alive

    async def counters(self) -> dict[str, int]:
        """Of the main process."""
        counts: dict[str, int] = await self.call("counters")
        return counts

    async def metrics_text(self) -> bytes:
        """Of all workers' requests together."""
        text: bytes = await self.call("metrics_text")
        return text


class RemoteAdapters:
    """See `AdaptersFrontend`."""

    def __init__(self, frontend: RemoteFrontend) -> None:
        self._frontend = frontend

    @property
    def names(self) -> list[str]:
        """As last heard."""
        return self._frontend.news.adapters

    async def load(self, name: str, path: str, pinned: bool = False) -> None:
        """Raises RequestError, CapacityError, ExecutionError."""
        await self._frontend.call("adapters.load", name=name, path=path, pinned=pinned)

    async def unload(self, name: str) -> None:
        """Raises NotFoundError, ExecutionError."""
        await self._frontend.call("adapters.unload", name=name)


class RemoteControl:
    """See `ControlFrontend`."""

    def __init__(self, frontend: RemoteFrontend) -> None:
        self._frontend = frontend

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReply:
        """Raises CapacityError, ExecutionError."""
        reply: FlushCacheReply = await self._frontend.call("control.flush_cache", timeout_s=timeout_s)
        return reply

    async def internal_state(self) -> InternalState:
        """Raises CapacityError, ExecutionError."""
        state: InternalState = await self._frontend.call("control.internal_state")
        return state

    async def internal_states(self) -> list[InternalState]:
        """Raises CapacityError, ExecutionError."""
        states: list[InternalState] = await self._frontend.call("control.internal_states")
        return states

    async def start_profile(
        self, output_name: str, num_steps: int, activities: tuple[Literal["CPU", "GPU"], ...]
    ) -> str:
        """Raises RequestError."""
        message: str = await self._frontend.call(
            "control.start_profile", output_name=output_name, num_steps=num_steps, activities=activities
        )
        return message

    async def stop_profile(self) -> str:
        """Raises RequestError."""
        message: str = await self._frontend.call("control.stop_profile")
        return message

    async def inject_fault(self, fault: FaultReq) -> None:
        """Raises NotFoundError."""
        await self._frontend.call("control.inject_fault", fault=fault)


class RemoteRecords:
    """See `RecordsFrontend`."""

    def __init__(self, frontend: RemoteFrontend) -> None:
        self._frontend = frontend

    async def timelines(self, rid: str, caller: Caller = NOBODY) -> list[dict[str, Any]]:
        """Raises NotFoundError."""
        samples: list[dict[str, Any]] = await self._frontend.call(
            "records.timelines", rid=rid, caller=WireCaller.of(caller)
        )
        return samples

    async def dump(self) -> tuple[str, int]:
        """Raises RequestError, ExecutionError."""
        written: tuple[str, int] = await self._frontend.call("records.dump")
        return written


class RemoteSettings:
    """See `SettingsFrontend`."""

    def __init__(self, frontend: RemoteFrontend) -> None:
        self._frontend = frontend

    async def configure_logging(
        self,
        level: LogLevel | None,
        log_requests: bool | None,
        log_requests_level: int | None,
    ) -> dict[str, Any]:
        """Raises RequestError."""
        given = {"level": level, "log_requests": log_requests, "log_requests_level": log_requests_level}
        now: dict[str, Any] = await self._frontend.call("settings.configure_logging", **given)
        return now

    async def freeze_gc(self) -> None:
        """In the other processes; workers did so when they began. Raises CapacityError, ExecutionError."""
        await self._frontend.call("settings.freeze_gc")

    async def change_limits(self, changes: LimitChanges) -> Limits:
        """Raises RequestError, CapacityError."""
        now: Limits = await self._frontend.call("settings.change_limits", changes=changes)
        return now

    async def changed_options(self) -> dict[str, Any]:
        """Of all processes."""
        changed: dict[str, Any] = await self._frontend.call("settings.changed_options")
        return changed


class RemoteExperts:
    """See `ExpertsFrontend`."""

    def __init__(self, frontend: RemoteFrontend) -> None:
        self._frontend = frontend

    async def start(self) -> None:
        """Raises RequestError, ExecutionError."""
        await self._frontend.call("experts.start")

    async def stop(self) -> None:
        """Raises RequestError, ExecutionError."""
        await self._frontend.call("experts.stop")

    async def dump(self) -> dict[str, Any]:
        """Raises RequestError, ExecutionError."""
        counts: dict[str, Any] = await self._frontend.call("experts.dump")
        return counts


class RemoteWeights:
    """See `WeightFrontend`."""

    def __init__(self, frontend: RemoteFrontend) -> None:
        self._frontend = frontend

    @property
    def version(self) -> str:
        """As last heard."""
        return self._frontend.news.weight_version

    @property
    def model_path(self) -> str | None:
        """As last heard."""
        return self._frontend.news.model_path

    async def operate(self, operation: WeightOperation) -> WeightOpReply:
        """Raises RequestError, CapacityError, ExecutionError."""
        reply: WeightOpReply = await self._frontend.call("weights.operate", operation=operation)
        return reply
