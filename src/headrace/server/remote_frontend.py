"""The front end in an HTTP worker (--tokenizer-worker-num): a proxy whose methods run in the main process.

Does not own requests or limits: the main process does, for all workers. Nor how a call crosses: `remote_calls` does. Runs in the worker's
event loop.
"""

from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec

from headrace.frontend.remote_methods import WireCaller
from headrace.frontend.runtime_settings import LimitChanges, Limits, LogLevel
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.tenants import NOBODY, Caller
from headrace.media_kinds import MediaRefs
from headrace.messages.cache_tree import CacheTree
from headrace.messages.control import FaultReq, FlushCacheReply, InternalState
from headrace.messages.requests import EmbeddingReqInput, GenerateReqInput
from headrace.messages.weights import WeightOperation, WeightOpReply
from headrace.server.remote_calls import RemoteCalls

_UPDATES = msgspec.msgpack.Decoder(SampleUpdate)


class RemoteFrontend:
    """See the module docstring; the methods are those of `RequestFrontend`."""

    def __init__(self, calls: RemoteCalls) -> None:
        self._calls = calls
        self.adapters = RemoteAdapters(calls)
        self.control = RemoteControl(calls)
        self.experts = RemoteExperts(calls)
        self.records = RemoteRecords(calls)
        self.settings = RemoteSettings(calls)
        self.weights = RemoteWeights(calls)

    def generate_request(
        self,
        obj: GenerateReqInput,
        *,
        default_max_new_tokens: int = -1,
        in_chat: bool = False,
        caller: Caller | None = None,
    ) -> AsyncGenerator[SampleUpdate, None]:
        """See `RequestFrontend`. default_max_new_tokens: -1 = the main process's. Raises RequestError."""
        arguments: dict[str, Any] = {"obj": _with_json_as_text(obj)}
        if default_max_new_tokens >= 0:
            arguments["default_max_new_tokens"] = default_max_new_tokens
        if in_chat:
            arguments["in_chat"] = True
        if caller is not None:
            arguments["caller"] = WireCaller.of(caller)
        return self._calls.stream("generate_request", _UPDATES.decode, arguments)

    def encode_request(
        self, obj: EmbeddingReqInput, *, caller: Caller | None = None
    ) -> AsyncGenerator[SampleUpdate, None]:
        """See `RequestFrontend`. Raises RequestError."""
        arguments: dict[str, Any] = {"obj": obj}
        if caller is not None:
            arguments["caller"] = WireCaller.of(caller)
        return self._calls.stream("encode_request", _UPDATES.decode, arguments)

    async def ids_with_media(self, input_ids: list[int], media: MediaRefs, caller: Caller = NOBODY) -> list[int]:
        """Raises RequestError."""
        given = {"input_ids": input_ids, "media": media, "caller": WireCaller.of(caller)}
        ids: list[int] = await self._calls.call("ids_with_media", **given)
        return ids

    def abort_request(self, rid: str = "", abort_all: bool = False, caller: Caller = NOBODY) -> None:
        """Waiting clients get the output so far."""
        self._calls.tell("abort_request", rid=rid, abort_all=abort_all, caller=WireCaller.of(caller))

    async def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        timeout_s: float | None = None,
        caller: Caller = NOBODY,
    ) -> str:
        """Raises RequestError, CapacityError."""
        given = {"capacity_of_str_len": capacity_of_str_len, "session_id": session_id, "timeout_s": timeout_s}
        session: str = await self._calls.call("open_session", **given, caller=WireCaller.of(caller))
        return session

    async def close_session(self, session_id: str, caller: Caller = NOBODY) -> None:
        """Raises NotFoundError."""
        await self._calls.call("close_session", session_id=session_id, caller=WireCaller.of(caller))

    async def health(self, generate: bool = False) -> bool:
        """False, too, when the main process does not answer."""
        alive: bool = await self._calls.call("health", generate=generate)
        return alive

    async def counters(self) -> dict[str, int]:
        """Of the main process."""
        counts: dict[str, int] = await self._calls.call("counters")
        return counts

    async def metrics_text(self) -> bytes:
        """Of all workers' requests together."""
        text: bytes = await self._calls.call("metrics_text")
        return text

    def count_reply(self, route: str, status: int) -> None:
        """In the main process, which counts for all workers."""
        self._calls.tell("count_reply", route=route, status=status)


def _with_json_as_text(obj: GenerateReqInput) -> GenerateReqInput:
    """The call as a message can hold it, whatever its schemas are. Raises RequestError."""
    given = obj.sampling_params
    if given is None:
        return obj
    sent = [one.with_json_as_text() for one in given] if isinstance(given, list) else given.with_json_as_text()
    return msgspec.structs.replace(obj, sampling_params=sent)


class RemoteAdapters:
    """See `AdaptersFrontend`."""

    def __init__(self, calls: RemoteCalls) -> None:
        self._calls = calls

    @property
    def names(self) -> list[str]:
        """As last heard."""
        return self._calls.news.adapters

    async def load(self, name: str, path: str, pinned: bool = False) -> None:
        """Raises RequestError, CapacityError, ExecutionError."""
        await self._calls.call("adapters.load", name=name, path=path, pinned=pinned)

    async def unload(self, name: str) -> None:
        """Raises NotFoundError, ExecutionError."""
        await self._calls.call("adapters.unload", name=name)


class RemoteControl:
    """See `ControlFrontend`."""

    def __init__(self, calls: RemoteCalls) -> None:
        self._calls = calls

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReply:
        """Raises CapacityError, ExecutionError."""
        reply: FlushCacheReply = await self._calls.call("control.flush_cache", timeout_s=timeout_s)
        return reply

    async def internal_state(self) -> InternalState:
        """Raises CapacityError, ExecutionError."""
        state: InternalState = await self._calls.call("control.internal_state")
        return state

    async def internal_states(self) -> list[InternalState]:
        """Raises CapacityError, ExecutionError."""
        states: list[InternalState] = await self._calls.call("control.internal_states")
        return states

    async def cache_trees(self, max_depth: int, max_nodes: int) -> list[CacheTree]:
        """Raises CapacityError, ExecutionError."""
        trees: list[CacheTree] = await self._calls.call("control.cache_trees", max_depth=max_depth, max_nodes=max_nodes)
        return trees

    async def start_profile(
        self, output_name: str, num_steps: int, activities: tuple[Literal["CPU", "GPU"], ...]
    ) -> str:
        """Raises RequestError."""
        message: str = await self._calls.call(
            "control.start_profile", output_name=output_name, num_steps=num_steps, activities=activities
        )
        return message

    async def stop_profile(self) -> str:
        """Raises RequestError."""
        message: str = await self._calls.call("control.stop_profile")
        return message

    async def inject_fault(self, fault: FaultReq) -> None:
        """Raises NotFoundError."""
        await self._calls.call("control.inject_fault", fault=fault)


class RemoteRecords:
    """See `RecordsFrontend`."""

    def __init__(self, calls: RemoteCalls) -> None:
        self._calls = calls

    async def timelines(self, rid: str, caller: Caller = NOBODY) -> list[dict[str, Any]]:
        """Raises NotFoundError."""
        samples: list[dict[str, Any]] = await self._calls.call(
            "records.timelines", rid=rid, caller=WireCaller.of(caller)
        )
        return samples

    async def latest(self, limit: int, caller: Caller = NOBODY) -> list[dict[str, Any]]:
        """Of all workers' requests."""
        samples: list[dict[str, Any]] = await self._calls.call(
            "records.latest", limit=limit, caller=WireCaller.of(caller)
        )
        return samples

    async def dump(self) -> tuple[str, int]:
        """Raises RequestError, ExecutionError."""
        written: tuple[str, int] = await self._calls.call("records.dump")
        return written


class RemoteSettings:
    """See `SettingsFrontend`."""

    def __init__(self, calls: RemoteCalls) -> None:
        self._calls = calls

    async def configure_logging(
        self,
        level: LogLevel | None,
        log_requests: bool | None,
        log_requests_level: int | None,
    ) -> dict[str, Any]:
        """Raises RequestError."""
        given = {"level": level, "log_requests": log_requests, "log_requests_level": log_requests_level}
        now: dict[str, Any] = await self._calls.call("settings.configure_logging", **given)
        return now

    async def freeze_gc(self) -> None:
        """In the other processes; workers did so when they began. Raises CapacityError, ExecutionError."""
        await self._calls.call("settings.freeze_gc")

    async def change_limits(self, changes: LimitChanges) -> Limits:
        """Raises RequestError, CapacityError."""
        now: Limits = await self._calls.call("settings.change_limits", changes=changes)
        return now

    async def changed_options(self) -> dict[str, Any]:
        """Of all processes."""
        changed: dict[str, Any] = await self._calls.call("settings.changed_options")
        return changed


class RemoteExperts:
    """See `ExpertsFrontend`."""

    def __init__(self, calls: RemoteCalls) -> None:
        self._calls = calls

    async def start(self) -> None:
        """Raises RequestError, ExecutionError."""
        await self._calls.call("experts.start")

    async def stop(self) -> None:
        """Raises RequestError, ExecutionError."""
        await self._calls.call("experts.stop")

    async def dump(self) -> dict[str, Any]:
        """Raises RequestError, ExecutionError."""
        counts: dict[str, Any] = await self._calls.call("experts.dump")
        return counts


class RemoteWeights:
    """See `WeightFrontend`."""

    def __init__(self, calls: RemoteCalls) -> None:
        self._calls = calls

    @property
    def version(self) -> str:
        """As last heard."""
        return self._calls.news.weight_version

    @property
    def model_path(self) -> str | None:
        """As last heard."""
        return self._calls.news.model_path

    async def operate(self, operation: WeightOperation) -> WeightOpReply:
        """Raises RequestError, CapacityError, ExecutionError."""
        reply: WeightOpReply = await self._calls.call("weights.operate", operation=operation)
        return reply
