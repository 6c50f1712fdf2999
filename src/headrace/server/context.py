"""What the handlers are given: the way to the engine, the served model and the server's options.

Runs in the event loop of the main process.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.checkpoint.sampling_defaults import SamplingDefaults
from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, ContextLengthError, NotFoundError, RequestError
from headrace.frontend.prompts import refuse_text
from headrace.messages.control import ReadyInfo
from headrace.server.request_frontend import RequestFrontend
from headrace.text.chat_templates import ChatTemplate
from headrace.text.tokenizers import Tokenizer

T = TypeVar("T")
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
