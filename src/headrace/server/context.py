"""What the handlers are given: the way to the engine, the served model and the server's options.

Runs in the event loop of the main process.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from headrace.checkpoint.sampling_defaults import SamplingDefaults
from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, ContextLengthError, NotFoundError, RequestError
from headrace.frontend.prompts import refuse_text
from headrace.frontend.runtime_settings import LimitChanges, Limits, LogLevel
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.tenants import Caller
from headrace.messages.control import FaultReq, FlushCacheReply, InternalState, ReadyInfo
from headrace.messages.requests import GenerateReqInput
from headrace.messages.weights import WeightOperation, WeightOpReply
from headrace.text.chat_templates import ChatTemplate
from headrace.text.tokenizers import Tokenizer

T = TypeVar("T")
Soon: TypeAlias = T | Awaitable[T]
"""An answer that is there at once when the front end is in this process, and is awaited when it is not (`remote_frontend`)."""

TEXT_WORK_LIMIT_S = 10.0
"""Rendering and tokenizing one request may take so long, from when a thread begins; then the request is refused."""

TEXT_WAIT_LIMIT_S = 10.0
"""A request waits so long for a thread to be free; then the server has no room for it."""

DEFAULT_MODEL = "default"
"""The name that clients of SGLang give when they mean whatever is served."""

MAX_CHARS_PER_TOKEN = 256
"""More than any token of text has, with room for normalizers that shorten: a bound on work, not on prompts."""

MAX_TEXT_CHARS = 4 << 20
MAX_WHOLE_CHARS = 1 << 20
USUAL_CHARS_PER_TOKEN = 8
"""Where the context is long, a text is refused beyond the larger of so many characters and so many for every token of the context."""


class WeightFrontend(Protocol):
    """What the server needs of the `WeightControl`."""

    @property
    def version(self) -> str:
        """What the weights are called now."""
        ...

    @property
    def model_path(self) -> str | None:
        """Where the weights that serve were read from, when that was after the start."""
        ...

    async def operate(self, operation: WeightOperation) -> WeightOpReply:
        """Carry out one operation; its reply says whether it succeeded."""
        ...


class ExpertsFrontend(Protocol):
    """What the server needs of the `ExpertRecording`."""

    async def start(self) -> None:
        """Count from zero. Raises RequestError, ExecutionError."""
        ...

    async def stop(self) -> None:
        """Count no more. Raises RequestError, ExecutionError."""
        ...

    async def dump(self) -> dict[str, Any]:
        """What was counted, which begins again at zero. Raises RequestError, ExecutionError."""
        ...


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
        """Waits for those who use it. Raises NotFoundError, ExecutionError."""
        ...


class ControlFrontend(Protocol):
    """What the server needs of the `Control`."""

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReply:
        """Empty the prefix cache unless requests run; wait at most `timeout_s` seconds for them to end. Raises RequestError."""
        ...

    async def internal_state(self) -> InternalState:
        """Counters and pool accounting of the schedulers, together."""
        ...

    async def internal_states(self) -> list[InternalState]:
        """Of each that lives."""
        ...

    async def start_profile(
        self, output_name: str, num_steps: int, activities: tuple[Literal["CPU", "GPU"], ...]
    ) -> str:
        """Record the worker's steps. Raises RequestError."""
        ...

    async def stop_profile(self) -> str:
        """Write what was recorded; a line with the file's name. Raises RequestError."""
        ...

    async def inject_fault(self, fault: FaultReq) -> None:
        """Test hook."""
        ...


class RecordsFrontend(Protocol):
    """What the server needs of the `Records`."""

    def timelines(self, rid: str, caller: Caller = ...) -> Soon[list[dict[str, Any]]]:
        """What happened to a request's samples, of the caller's or for an admin of anybody's. Raises NotFoundError."""
        ...

    async def dump(self) -> tuple[str, int]:
        """Write what the last requests were; the file's name and how many. Raises RequestError, ExecutionError."""
        ...


class SettingsFrontend(Protocol):
    """What the server needs of the `RuntimeSettings`."""

    def configure_logging(
        self,
        level: LogLevel | None,
        log_requests: bool | None,
        log_requests_level: int | None,
    ) -> Soon[dict[str, Any]]:
        """Change what is logged; what now holds. Raises RequestError."""
        ...

    def freeze_gc(self) -> Soon[None]:
        """Leave what lives now out of garbage collection, in every process. Raises CapacityError, ExecutionError."""
        ...

    def change_limits(self, changes: LimitChanges) -> Soon[Limits]:
        """Change limits in every replica; what now holds. Raises RequestError, CapacityError."""
        ...

    def changed_options(self) -> Soon[dict[str, Any]]:
        """Options that were changed since the start, with their values of now."""
        ...


class RequestFrontend(Protocol):
    """What the server needs of the TokenizerManager."""

    def generate_request(
        self,
        obj: GenerateReqInput,
        *,
        default_max_new_tokens: int = ...,
        caller: Caller = ...,
    ) -> AsyncGenerator[SampleUpdate, None]:
        """What is new of the samples of one call. Without `stream` one update of each, in prompt-major order, once all have ended.

        default_max_new_tokens: where the request does not say; never more than the context has room for.
        caller: whose limits count. Closing the generator early aborts what is unfinished.
        Raises RequestError, CapacityError, ExecutionError.
        """
        ...

    def abort_request(self, rid: str = "", abort_all: bool = False, caller: Caller = ...) -> None:
        """Abort the caller's samples of `rid`, or all; an unknown rid is harmless."""
        ...

    def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        timeout_s: float | None = None,
        caller: Caller = ...,
    ) -> Soon[str]:
        """A new session's id. Raises RequestError, CapacityError."""
        ...

    def close_session(self, session_id: str, caller: Caller = ...) -> Soon[None]:
        """Forget a session of the caller's, or for an admin anybody's. Raises NotFoundError."""
        ...

    async def health(self, generate: bool = False) -> bool:
        """The engine is alive; with `generate`, it has also just made a token."""
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
        """What happened to the last requests."""
        ...

    @property
    def settings(self) -> SettingsFrontend:
        """What may change at run time."""
        ...

    @property
    def experts(self) -> ExpertsFrontend:
        """Which experts a mixture chooses."""
        ...

    @property
    def weights(self) -> WeightFrontend:
        """Operations on weights, generation and memory."""
        ...

    def counters(self) -> Soon[dict[str, int]]:
        """Counters of this process."""
        ...

    def metrics_text(self) -> Soon[bytes]:
        """Every metric, in Prometheus' text format."""
        ...


async def answer(soon: Soon[T]) -> T:
    """The answer, once it is there."""
    return await soon if isinstance(soon, Awaitable) else soon


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as clients see it. `chat_template` is None when it has none."""

    name: str
    context_length: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    ready: ReadyInfo
    model_type: str = ""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class ServerStatus:
    """Whether the server takes requests. `draining` is set by the process that is about to stop it."""

    started: bool = False
    draining: bool = False

    @property
    def ready(self) -> bool:
        """New requests are welcome."""
        return self.started and not self.draining


@dataclass(slots=True)
class ServingContext:
    """Shared by all handlers."""

    frontend: RequestFrontend
    model: ServedModel
    args: ServerArgs
    status: ServerStatus
    text_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=2, thread_name_prefix="headrace-text")
    )

    def adapter_of(self, name: str) -> str | None:
        """The adapter that the model name `adapter` or `model:adapter` means; None for the served model itself.

        "" and "default" (unless an adapter is called so) are the served model. Raises NotFoundError.
        """
        if name in ("", self.model.name):
            return None
        adapters = self.frontend.adapters.names
        if name == DEFAULT_MODEL and name not in adapters:
            return None
        for adapter in (name, name.removeprefix(f"{self.model.name}:")):
            if adapter in adapters:
                return adapter
        shown = name if len(name) <= 100 else name[:100] + "..."
        message = f"the model {shown!r} is not served here; this server has {self.model.name!r}"
        raise NotFoundError(message, "model", "model_not_found")

    @property
    def max_text_chars(self) -> int:
        """Characters of a text that is tokenized at all."""
        context = self.model.context_length
        return min(context * MAX_CHARS_PER_TOKEN, max(MAX_TEXT_CHARS, context * USUAL_CHARS_PER_TOKEN))

    def check_tokenizer(self, param: str) -> None:
        """Raises RequestError when this server has no tokenizer, which `param` needs."""
        if self.args.skip_tokenizer_init:
            refuse_text(param)

    def check_text_length(self, param: str, num_chars: int, whole: bool = False) -> None:
        """Raises RequestError for a text that cannot fit into the context however it is tokenized: it is not even tried.

        whole: it would be tokenized to its end, also beyond the context.
        """
        limit = self.max_text_chars
        if whole:
            limit = min(limit, max(MAX_WHOLE_CHARS, self.model.context_length * USUAL_CHARS_PER_TOKEN))
        if num_chars > limit:
            context = self.model.context_length
            asked = f"{param} has {num_chars} characters, and that many tokens hold at most {limit}"
            raise ContextLengthError(param, context, asked)

    def check_prompt_size(
        self, param: str, text: str | list[str] | None, input_ids: list[int | list[int]] | None
    ) -> None:
        """Raises RequestError for prompts that cannot fit, by their lengths alone: nothing is looked at one by one."""
        for one in [text] if isinstance(text, str) else text or []:
            self.check_text_length(param, len(one))
        ids = input_ids or []
        for count in [len(row) for row in ids if isinstance(row, list)] or [len(ids)]:
            if count > self.model.context_length:
                raise ContextLengthError.of_prompt(param, self.model.context_length, count)

    async def in_text_thread(self, work: Callable[[], T]) -> T:
        """Run `work` (rendering, tokenizing) off the event loop.

        Raises CapacityError when no thread is free within `TEXT_WAIT_LIMIT_S`, RequestError when the work itself takes longer
        than `TEXT_WORK_LIMIT_S`.
        """
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        def run() -> T:
            loop.call_soon_threadsafe(begun.set)
            return work()

        future = self.text_threads.submit(run)
        try:
            await asyncio.wait_for(begun.wait(), TEXT_WAIT_LIMIT_S)
        except TimeoutError:
            raise CapacityError(
                f"the prompt waited {TEXT_WAIT_LIMIT_S:g} s to be prepared: too many long prompts at once"
            ) from None
        finally:
            if not begun.is_set():
                future.cancel()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), TEXT_WORK_LIMIT_S)
        except TimeoutError:
            raise RequestError(f"preparing the prompt took longer than {TEXT_WORK_LIMIT_S:g} s") from None
