"""The server's view of the front end as Protocols: one for generation, and one for each part that the front end exposes.

The front end is the `TokenizerManager` if the server runs in the main process, and a proxy of it (`remote_frontend`) in an HTTP worker.
"""

from collections.abc import AsyncGenerator, Awaitable
from typing import Any, Protocol, TypeAlias, TypeVar

from headrace.frontend.front_door import remote_methods
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.tenants import Caller
from headrace.media_kinds import MediaRefs
from headrace.messages.control import FaultReq, FlushCacheReply, InternalState
from headrace.messages.requests import EmbeddingReqInput, GenerateReqInput
from headrace.messages.weights import WeightOperation, WeightOpReply

T = TypeVar("T")
MaybeAwaitable: TypeAlias = T | Awaitable[T]
"""A result that is returned directly if the front end is in this process, and awaited if it is not (`remote_frontend`)."""


async def answer(result: MaybeAwaitable[T]) -> T:
    """The result, awaited if necessary."""
    return await result if isinstance(result, Awaitable) else result


class AdaptersFrontend(Protocol):
    """What the server needs of the `Adapters`."""

    @property
    def names(self) -> list[str]:
        """Every adapter that requests may name."""
        ...

    async def load(self, name: str, path: str, pinned: bool = False) -> None:
        """Raises RequestError, CapacityError, ExecutionError."""
        ...

    async def unload(self, name: str) -> None:
        """Wait for the requests that use it, then unload it. Raises NotFoundError, ExecutionError."""
        ...


class ControlFrontend(Protocol):
    """What the server needs of the `Control`."""

    async def ask(self, name: str, request: bytes) -> dict[int, bytes]:
        """A control operation, see `messages.operations`. Raises HeadraceError."""
        ...

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReply:
        """Empty the prefix cache unless requests run; wait at most `timeout_s` seconds for them to end. Raises RequestError."""
        ...

    async def internal_state(self) -> InternalState:
        """Counters and pool accounting of the schedulers, together."""
        ...

    async def internal_states(self) -> list[InternalState]:
        """Counters and pool accounting of each live scheduler."""
        ...

    async def inject_fault(self, fault: FaultReq) -> None:
        """Test hook."""
        ...


class RecordsFrontend(Protocol):
    """What the server needs of the `Records`."""

    def timelines(self, rid: str, caller: Caller = ...) -> MaybeAwaitable[list[dict[str, Any]]]:
        """The timelines of a request of the caller, or for an admin of any caller. Raises NotFoundError."""
        ...

    def latest(self, limit: int, caller: Caller = ...) -> MaybeAwaitable[list[dict[str, Any]]]:
        """The last samples of the caller, or for an admin of any caller, without their events; live ones first."""
        ...


class SettingsFrontend(Protocol):
    """What the server needs of the `RuntimeSettings`."""

    def changed_options(self) -> MaybeAwaitable[dict[str, Any]]:
        """Options changed since the start, with their current values."""
        ...


class WeightFrontend(Protocol):
    """What the server needs of the `WeightControl`."""

    @property
    def version(self) -> str:
        """Version name of the current weights."""
        ...

    @property
    def model_path(self) -> str | None:
        """From where the current weights were read, if that was after the start."""
        ...

    async def operate(self, operation: WeightOperation) -> WeightOpReply:
        """Carry out one operation; its reply says whether it succeeded."""
        ...


class RequestFrontend(Protocol):
    """What the server needs of the TokenizerManager."""

    def generate_request(
        self,
        obj: GenerateReqInput,
        *,
        default_max_new_tokens: int = ...,
        in_chat: bool = ...,
        caller: Caller = ...,
    ) -> AsyncGenerator[SampleUpdate, None]:
        """Yields the new output of the samples of one call. Without `stream`, one update per sample in prompt-major order, once all have ended.

        default_max_new_tokens: used if the request sets none; limited to the room in the context. in_chat: the prompt is a rendered chat.
        caller: its limits apply. Closing the generator early aborts what is unfinished.
        Raises RequestError, CapacityError, ExecutionError.
        """
        ...

    def encode_request(self, obj: EmbeddingReqInput, *, caller: Caller = ...) -> AsyncGenerator[SampleUpdate, None]:
        """Yields one update of each input, in order, once all have ended; its `pooled` is None if the input failed.

        caller: its limits apply. Closing the generator early aborts what is unfinished. Raises RequestError, CapacityError, ExecutionError.
        """
        ...

    async def ids_with_media(self, input_ids: list[int], media: MediaRefs, caller: Caller = ...) -> list[int]:
        """The tokens of a prompt with those of media in place of their tokens. caller: whose media they are. Raises RequestError."""
        ...

    def abort_request(self, rid: str = "", abort_all: bool = False, caller: Caller = ...) -> None:
        """Abort the caller's samples of `rid`, or all; unknown rids are ignored."""
        ...

    def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        timeout_s: float | None = None,
        caller: Caller = ...,
    ) -> MaybeAwaitable[str]:
        """Open a session and return its id. Raises RequestError, CapacityError."""
        ...

    def close_session(self, session_id: str, caller: Caller = ...) -> MaybeAwaitable[None]:
        """Close a session of the caller, or for an admin any session. Raises NotFoundError."""
        ...

    async def health(self, generate: bool = False) -> bool:
        """Whether the engine is alive and, with `generate`, can generate a token."""
        ...

    @property
    def adapters(self) -> AdaptersFrontend:
        """The adapters that requests may name."""
        ...

    @property
    def control(self) -> ControlFrontend:
        """Caches, counters and profiles of the schedulers."""
        ...

    @property
    def records(self) -> RecordsFrontend:
        """Timelines and dumps of recent requests."""
        ...

    @property
    def settings(self) -> SettingsFrontend:
        """Settings that may change at run time."""
        ...

    @property
    def weights(self) -> WeightFrontend:
        """Operations on weights, generation and memory."""
        ...

    def counters(self) -> MaybeAwaitable[dict[str, int]]:
        """Counters of this process."""
        ...

    def metrics_text(self) -> MaybeAwaitable[bytes]:
        """Every metric, in Prometheus' text format."""
        ...

    def count_reply(self, route: str, status: int) -> None:
        """Count an HTTP reply for the metrics. route: the declared path, not the one that was sent."""
        ...


PARTS: dict[str, type] = {
    "adapters": AdaptersFrontend,
    "control": ControlFrontend,
    "records": RecordsFrontend,
    "settings": SettingsFrontend,
    "weights": WeightFrontend,
}
"""The parts of a `RequestFrontend`, by name."""

METHODS = remote_methods(RequestFrontend) | {
    f"{part}.{name}": method for part, protocol in PARTS.items() for name, method in remote_methods(protocol).items()
}
"""Every method that an HTTP worker can call in the main process, by name."""
