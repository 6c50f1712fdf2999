"""What every handler uses: the front end, the served model and the server's options.

Runs in the event loop that serves HTTP.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from headrace.checkpoint.pooling import PoolingConfig
from headrace.checkpoint.sampling_defaults import SamplingDefaults
from headrace.child_pool.pool import worked_s
from headrace.config.server_args import ServerArgs, spellings
from headrace.errors import ContextLengthError, NotFoundError, RequestError
from headrace.frontend.prompts import refuse_text
from headrace.frontend.sample_table import REPLIES_AT_ONCE
from headrace.frontend.tenants import Caller
from headrace.media_kinds import MediaKind, MediaRefs
from headrace.messages.control import ReadyInfo
from headrace.messages.media import NO_MEDIA_SUPPORT, MediaSupport
from headrace.parsers.registry import OutputFormat
from headrace.server.body import INLINE_BODY_BYTES, Bodies
from headrace.server.request_frontend import RequestFrontend
from headrace.text.chat_templates import ChatTemplate
from headrace.text.tokenizers import Tokenizer
from headrace.turns import Shares, Turns, asking

T = TypeVar("T")
TEXT_WORK_LIMIT_S = 10.0
"""Time limit for rendering and tokenizing one request in a thread; after it the request is refused."""

TEXT_WAIT_LIMIT_S = 10.0
"""Time limit of waiting for a turn; after it the request gets a 503."""

REPLY_WAIT_LIMIT_S = 600.0

INLINE_REPLY_BYTES = 64 << 10
"""Replies up to this size are made in the event loop, and do not count among those that wait to be read."""

DEFAULT_MODEL = "default"
"""The name by which SGLang's clients request whatever model is served."""

MAX_CHARS_PER_TOKEN = 256
"""More characters than any token of text has, even before a normalizer that shortens it: limits work, not prompts."""

MAX_TEXT_CHARS = 4 << 20
MAX_WHOLE_CHARS = 1 << 20
USUAL_CHARS_PER_TOKEN = 8
"""With a long context, the limit of a text is the larger of MAX_TEXT_CHARS and this many characters per token of the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as clients see it.

    name: in replies. aliases: other names that clients may call it.
    chat_template: None if it has none. tool_template: another one for conversations with tools; None = the same. output_format: how it writes tool
    calls and reasoning; None = it writes neither. media_support: of which kinds. pooling: what it makes of a text instead of more text; None =
    it generates. model_type, architectures: as the checkpoint's config.json says. reply_limit: most tokens of a chat's reply whose request gives no
    limit; 0 = as many as fit.
    """

    name: str
    context_length: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    ready: ReadyInfo
    tool_template: ChatTemplate | None = None
    output_format: OutputFormat | None = None
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    pooling: PoolingConfig | None = None
    media_support: MediaSupport = NO_MEDIA_SUPPORT
    reply_limit: int = 0
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, ...]:
        """What clients call it."""
        return (self.name, *self.aliases)

    @property
    def default_reply_tokens(self) -> int:
        """The limit of a chat's reply that has none; the room in the context limits it, too."""
        return self.reply_limit or self.context_length


@dataclass(slots=True)
class ServerStatus:
    """Whether the server accepts requests. `draining` is set when the server is about to stop."""

    started: bool = False
    draining: bool = False

    @property
    def ready(self) -> bool:
        return self.started and not self.draining


class Asker(Protocol):
    """Who asks for output: the exchange of an HTTP request, or a program in this process."""

    @property
    def caller(self) -> Caller: ...

    @property
    def context(self) -> "ServingContext": ...

    def forget_body(self) -> None:
        """The engine is about to have what was asked."""


def _text_threads() -> Turns:
    return Turns(3, "headrace-text", wait_limit_s=TEXT_WAIT_LIMIT_S, work_limit_s=TEXT_WORK_LIMIT_S, clock=worked_s)


def _reply_threads() -> Turns:
    # A reply that has begun must not end for want of a turn; a piece of one is small.
    return Turns(2, "headrace-reply", seconds_per_byte=6e-8, wait_limit_s=REPLY_WAIT_LIMIT_S)


@dataclass(slots=True)
class ServingContext:
    """Shared by all handlers. text_threads: two for long prompts, and one more for short ones. reply_threads: where outputs are written; a reply does
    not wait for the prompts of its client. replies: bytes of those that wait to be read."""

    frontend: RequestFrontend
    model: ServedModel
    args: ServerArgs
    status: ServerStatus
    text_threads: Turns = field(default_factory=_text_threads)
    reply_threads: Turns = field(default_factory=_reply_threads)
    bodies: Bodies = field(init=False)
    replies: Shares = field(init=False)

    def __post_init__(self) -> None:
        self.replies = Shares(REPLIES_AT_ONCE * self.args.max_reply_bytes, INLINE_REPLY_BYTES)
        self.bodies = Bodies(self.args.max_body_bytes)

    def chosen_adapter(self, name: str, lora_path: str | None) -> str | None:
        """The adapter that a request names as its model or in `lora_path`; None for the served model itself.

        Raises NotFoundError, and RequestError when the two name different ones.
        """
        adapter = self.adapter_of(name)
        if adapter is not None and lora_path not in (None, "", adapter):
            raise RequestError("model and lora_path name two adapters: give one of them", "lora_path")
        return adapter or lora_path

    def adapter_of(self, name: str) -> str | None:
        """The adapter that the model name `adapter` or `model:adapter` means; None for the served model itself. Raises NotFoundError."""
        listed = self.listed_name(name)
        return None if listed in self.model.names else listed

    def listed_name(self, name: str) -> str:
        """The one of `listed_names` that a model's name in a request means: the one rule for names, on every route.

        An adapter may also be called `model:adapter`, anything with or without the tag `:latest`. "" and "default" (unless an adapter has this name)
        mean the served model. Raises NotFoundError.
        """
        own, adapters = self.model.names, self.frontend.adapters.names
        if not name:
            return self.model.name
        for spelled in spellings(name):
            if spelled in own:
                return spelled
            for adapter in (spelled, *(spelled.removeprefix(f"{model}:") for model in own)):
                if adapter in adapters:
                    return adapter
            if spelled == DEFAULT_MODEL:
                return self.model.name
        shown = name if len(name) <= 100 else name[:100] + "..."
        message = f"the model {shown!r} is not served here; this server has {', '.join(map(repr, own))}"
        raise NotFoundError(message, "model", "model_not_found")

    def shown_model(self, name: str) -> str:
        """The model's name in the reply to a request for `name`: an adapter's as requested, or the served model's first. Raises NotFoundError."""
        return self.model.name if self.adapter_of(name) is None else name

    @property
    def listed_names(self) -> list[str]:
        """The names of the served model, then those of its adapters."""
        return [*self.model.names, *self.frontend.adapters.names]

    @property
    def max_text_chars(self) -> int:
        """Most characters of a text; longer ones are not even tokenized."""
        context = self.model.context_length
        return min(context * MAX_CHARS_PER_TOKEN, max(MAX_TEXT_CHARS, context * USUAL_CHARS_PER_TOKEN))

    def check_media(self, media: MediaRefs) -> None:
        """Raises RequestError for media that the model does not take, or too many of them."""
        for kind in MediaKind:
            count, limit = len(media.of(kind)), kind.limit_of(self.args)
            if count and kind not in self.model.media_support.tokens:
                raise RequestError(self.model.media_support.refusal(kind), "messages", kind.unsupported_code)
            if count > limit:
                raise RequestError(
                    f"there are {count} {kind.many}; the limit is {limit} ({kind.limit_option})", "messages"
                )

    def check_tokenizer(self, param: str) -> None:
        """Raises RequestError if the server has no tokenizer, which `param` needs."""
        if self.args.skip_tokenizer_init:
            refuse_text(param)

    def check_text_length(self, param: str, num_chars: int, whole: bool = False) -> None:
        """Raises RequestError for a text that cannot fit in the context, before it is tokenized.

        whole: it would be tokenized as a whole, even beyond the context.
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
        """Raises RequestError for prompts that cannot fit, judged by their lengths alone."""
        for one in [text] if isinstance(text, str) else text or []:
            self.check_text_length(param, len(one))
        ids = input_ids or []
        for count in [len(row) for row in ids if isinstance(row, list)] or [len(ids)]:
            if count > self.model.context_length:
                raise ContextLengthError.of_prompt(param, self.model.context_length, count)

    async def in_text_thread(self, work: Callable[[], T]) -> T:
        """Run `work` (rendering, tokenizing) off the event loop, when it is the turn of whose request it is.

        Raises CapacityError when that is not within `TEXT_WAIT_LIMIT_S`, RequestError when the work itself takes longer than `TEXT_WORK_LIMIT_S`.
        """
        return await self.text_threads.run(work)

    async def beside_others(self, work: Callable[[], T]) -> T:
        """`work()`, which takes as long as the body of the request is large: in a thread unless that is small. Raises as `in_text_thread` does."""
        return work() if asking().num_bytes <= INLINE_BODY_BYTES else await self.in_text_thread(work)

    async def written(self, write: Callable[[], T], num_bytes: int) -> T:
        """What `write()` makes of `num_bytes` of outputs: in a thread unless these are few. Raises what it raises."""
        return write() if num_bytes <= INLINE_REPLY_BYTES else await self.reply_threads.run(write, num_bytes)

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self.text_threads.close()
        self.reply_threads.close()
        self.bodies.close()


@dataclass(frozen=True, slots=True)
class Program:
    """An `Asker`: the program that owns the engine."""

    context: ServingContext
    caller: Caller = field(default_factory=Caller)

    def forget_body(self) -> None: ...
