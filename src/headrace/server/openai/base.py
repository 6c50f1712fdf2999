"""What the chat and completion routes share: checking, converting, streaming, counting tokens, naming errors. The shapes of the replies are the
subclasses' of `OpenAIServingBase`. Runs in the event loop that serves HTTP.
"""

import re
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from headrace.errors import RequestError
from headrace.frontend.prompts import refuse_routed_experts
from headrace.frontend.rooms import chosen_room, handed_on
from headrace.frontend.sample_update import PromptProgress, SampleUpdate
from headrace.media_kinds import MediaKind
from headrace.messages.outputs import SpeculationCounts
from headrace.messages.requests import GenerateReqInput
from headrace.server.context import INLINE_REPLY_BYTES, Asker, ServingContext
from headrace.server.http import Exchange, Headers, encode_json, json_pieces
from headrace.server.notes import OutputLimit, noted_fields
from headrace.server.openai.fields import AskedGrammar
from headrace.server.openai.protocol import GenerationRequest
from headrace.server.sse import failure_frames, stream_reply

R = TypeVar("R", bound=GenerationRequest)
G = TypeVar("G", bound="Generation[Any]")

_OUR_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs_num": "top_logprobs",
    "return_logprob": "logprobs",
}
_OUR_NAME = re.compile(rf"\b({'|'.join(_OUR_NAMES)}|input_ids)\b")


class PromptTokensDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """`cached_tokens`: prompt tokens whose KV was found in the prefix cache. `image_tokens` and so on: those of media, if there are any."""

    cached_tokens: int | None = None
    image_tokens: int | None = None
    audio_tokens: int | None = None
    video_tokens: int | None = None


class CompletionTokensDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """reasoning_tokens: output tokens that are reasoning. The others: draft tokens that were accepted and rejected, if the request predicts some."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts of a reply: each prompt once, the tokens of all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


@dataclass(slots=True)
class UsageCount:
    """Adds up the last update of every choice. `num_samples` choices share a prompt. report_drafts: whether the request predicts its output."""

    num_samples: int
    report_cached: bool
    report_drafts: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    media_tokens: Counter[MediaKind] = field(default_factory=Counter)
    guessed: SpeculationCounts | None = None

    def add(self, update: SampleUpdate) -> None:
        """Count a finished choice."""
        usage = update.usage
        self.completion_tokens += usage.completion_tokens
        if update.index % self.num_samples == 0:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
            self.media_tokens.update(usage.media_tokens)
        if self.report_drafts and update.speculation is not None:
            self.guessed = update.speculation.added_to(self.guessed)

    def total(self) -> Usage:
        media = {kind.tokens_field: count for kind, count in self.media_tokens.items() if count}
        cached = self.cached_tokens if self.report_cached else None
        details = PromptTokensDetails(cached, **media) if self.report_cached or media else None
        guesses = None
        if self.guessed is not None:
            right = self.guessed.num_right
            guesses = CompletionTokensDetails(None, right, self.guessed.num_drafted - right)
        num_tokens = self.prompt_tokens + self.completion_tokens
        return Usage(self.prompt_tokens, self.completion_tokens, num_tokens, details, guesses)


NOT_ENDED = b'"finish_reason":null'
"""Of the fields of `Generation.ending` what every chunk before the last of a choice has."""


@dataclass(slots=True)
class Generation(Generic[R]):
    """A converted request, and what is needed for its replies."""

    request: R
    call: GenerateReqInput
    id: str
    limit: OutputLimit
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def notes(self) -> list[str]:
        """Fields that are not honoured as they stand, as far as is known."""
        return [*self.request.noted, *self.limit.notes(self.request.limit_field)]

    def head(self, object_name: str) -> dict[str, object]:
        """The fields with which a reply and each of its chunks begin."""
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": "fp_headrace",
            **handed_on(self.call),
        }

    def ending(self, update: SampleUpdate) -> dict[str, str | int | None]:
        """Why the choice of a last update ended, as three fields of its reply.

        matched_stop: the stop string, or the id of the token that ended it; None unless finish_reason is "stop" (SGLang's field).
        stop_reason: the same, but None when the model ended by itself (vLLM's field).
        """
        assert update.finish is not None, "it has ended"
        matched = update.finish.matched
        was_asked_for = isinstance(matched, str) or matched in (self.request.stop_token_ids or ())
        return {
            "finish_reason": update.finish.type,
            "matched_stop": matched,
            "stop_reason": matched if was_asked_for else None,
        }


class OpenAIServingBase(ABC, Generic[R, G]):
    """Handler of one generation route."""

    request_type: type[R]
    id_prefix: str
    object_name: str
    prompt_field: str

    def __init__(self, context: ServingContext) -> None:
        self.context = context
        self._noted = noted_fields()

    async def handle_request(self, exchange: Exchange) -> None:
        """Answer one request. Errors name the fields as this API spells them."""
        request = await exchange.read_json(self.request_type)
        request = chosen_room(request, self.context.args, exchange.scope.get("server"))
        grammar = request.asked_grammar()
        try:
            generation = await self.prepare(request)
            exchange.name_request(generation.id)
            if generation.request.stream:
                await self._stream(exchange, generation, lambda exc: self.renamed(exc, request, grammar))
            else:
                await self._reply(exchange, generation)
        except RequestError as exc:
            raise self.renamed(exc, request, grammar) from None

    async def prepare(self, request: R) -> G:
        """Check a request and convert it, with the name that the reply gives the model, and the adapter that it means.

        Raises NotFoundError, and RequestError under our own parameter names, see `renamed`.
        """
        adapter = self.context.chosen_adapter(request.model, request.lora_path)
        request = msgspec.structs.replace(request, model=self.context.shown_model(request.model), lora_path=adapter)
        request.check()
        refuse_routed_experts(bool(request.return_routed_experts), self.context.model.ready.has_experts)
        return await self.convert(request)

    @abstractmethod
    async def convert(self, request: R) -> G:
        """The request as a call of the engine. Raises RequestError, also for what this route does not support."""

    @abstractmethod
    def updates(self, asker: Asker, generation: G) -> AsyncGenerator[SampleUpdate, None]:
        """Generate. Raises the errors of the engine."""

    def response(self, generation: G, updates: list[SampleUpdate], usage: Usage) -> object:
        """The reply of a request that does not stream; `updates` of all its samples, in prompt-major order."""
        choices = [self.choice(generation, update) for update in updates]
        return generation.head(self.object_name) | {"choices": choices} | self.ending(generation, updates, usage)

    @abstractmethod
    def choice(self, generation: G, update: SampleUpdate) -> dict[str, object]:
        """Of a reply that does not stream."""

    def ending(self, generation: G, updates: list[SampleUpdate], usage: Usage) -> dict[str, object]:
        """The fields of a reply after its choices, which have been made."""
        return {"usage": usage}

    @abstractmethod
    def chunk_writer(self, generation: G) -> "ChunkWriter":
        """The writer of the chunks of one stream."""

    def chosen(self, generation: G, updates: list[SampleUpdate]) -> list[SampleUpdate]:
        """Those of the samples of a reply that does not stream that become its choices."""
        return updates

    def total_usage(self, generation: G, usage: Usage) -> Usage:
        """The counts of a whole reply, whose chunks have been written."""
        return usage

    def new_id(self, request: R) -> str:
        """The completion's id, which is also the rid of the call."""
        return request.rid if request.rid is not None else f"{self.id_prefix}{uuid.uuid4().hex}"

    def headers(self, generation: G) -> Headers:
        """Of a reply that begins: the fields that are not honoured as they stand."""
        return self._noted.headers(generation.notes)

    def usage_count(self, generation: G) -> UsageCount:
        has_prediction = generation.call.prediction is not None
        return UsageCount(generation.request.num_candidates, self.context.args.enable_cache_report, has_prediction)

    async def _reply(self, exchange: Exchange, generation: G) -> None:
        updates = await exchange.all_of(self.updates(exchange, generation))
        count = self.usage_count(generation)
        for update in updates:
            count.add(update)
        updates, headers = self.chosen(generation, updates), self.headers(generation)
        if sum(update.num_bytes for update in updates) <= INLINE_REPLY_BYTES:
            await exchange.reply_json(self.response(generation, updates, count.total()), headers=headers)
            return
        async with exchange.until_client_leaves():
            await exchange.reply_in_pieces(self._pieces(generation, updates, count.total()), headers, updates)

    def _pieces(self, generation: G, updates: list[SampleUpdate], usage: Usage) -> Iterator[bytes]:
        """`response` as JSON in pieces."""
        before = encode_json(generation.head(self.object_name))[:-1] + b',"choices":['
        for update in updates:
            yield before
            yield from json_pieces(self.choice(generation, update))
            before = b","
        ending = json_pieces(self.ending(generation, updates, usage))
        yield b"]," + next(ending)[1:]
        yield from ending

    async def _stream(self, exchange: Exchange, generation: G, renamed: Callable[[RequestError], RequestError]) -> None:
        writer = self.chunk_writer(generation)
        count = self.usage_count(generation)
        failures: list[bytes] = []

        def render(update: SampleUpdate) -> bytes:
            if update.finish is not None:
                count.add(update)
                failures.append(failure_frames(update.finish))
            return writer.delta(update)

        def tail() -> bytes:
            wanted = generation.request.wants_usage
            usage = writer.usage(self.total_usage(generation, count.total())) if wanted else b""
            return usage + next(filter(None, failures), b"")

        await stream_reply(
            exchange,
            self.updates(exchange, generation),
            render,
            tail,
            renamed=renamed,
            headers=lambda: self.headers(generation),
        )

    def renamed(self, exc: RequestError, request: R, grammar: AskedGrammar | None) -> RequestError:
        """The error with our own parameter names replaced by this API's."""
        if grammar is not None and (exc.param == grammar.kind or exc.message.startswith(f"{grammar.kind}: ")):
            # The rest of the message may quote the grammar, and stays as it is.
            if exc.message.startswith(grammar.kind):
                exc.message = grammar.name + exc.message.removeprefix(grammar.kind)
            exc.param = grammar.name
            return exc
        names = dict(_OUR_NAMES, input_ids=self.prompt_field, max_new_tokens=request.limit_field)
        exc.message = _OUR_NAME.sub(lambda found: names[found[0]], exc.message)
        if exc.param == "text":
            exc.message = exc.message.replace("text: ", f"{self.prompt_field}: ", 1)
            exc.param = self.prompt_field
        exc.param = names.get(exc.param, exc.param) if exc.param is not None else None
        return exc


class ChunkWriter(ABC):
    """Makes the frames of one stream; bytes that do not change are made only once.

    id, object name, time and model of all chunks: see `head`. If usage is requested, every chunk has `"usage":null`.
    """

    def __init__(self, generation: Generation[Any], object_name: str) -> None:
        self.head = b"data: " + encode_json(generation.head(object_name))[:-1]
        self.choice_head = self.head + b',"choices":[{"index":'
        self.no_usage = b',"usage":null' if generation.request.wants_usage else b""
        self.choice_tail = b"}]%b}\n\n" % self.no_usage
        self.wants_ids = bool(generation.request.return_token_ids)
        options = generation.request.stream_options
        self.counts_everywhere = bool(self.no_usage and options is not None and options.continuous_usage_stats)

    def tail(self, update: SampleUpdate, with_ids: bool = True, in_choice: bytes = b"", beside: bytes = b"") -> bytes:
        """The end of a chunk made from `update`: its token ids and the counts so far, if requested.

        in_choice, beside: more fields of the choice and of the chunk, each after a comma.
        """
        if not (self.wants_ids or self.counts_everywhere):
            return self.choice_tail
        ids = b',"token_ids":' + encode_json(update.ids) if self.wants_ids and with_ids else b""
        usage = self.no_usage
        if self.counts_everywhere:
            made, given = update.usage.completion_tokens, update.usage.prompt_tokens
            usage = b',"usage":' + encode_json(Usage(given, made, given + made))
        return b"%b%b}]%b%b}\n\n" % (ids, in_choice, beside, usage)

    def progress_tail(self, progress: PromptProgress) -> bytes:
        """The end of a chunk that says how far a prompt is, with the name that llama.cpp's server gives it."""
        return b'}],"prompt_progress":%b%b}\n\n' % (encode_json(progress), self.no_usage)

    @abstractmethod
    def delta(self, update: SampleUpdate) -> bytes:
        """Frames for the new output of a choice; may be empty. The last text of a choice and its finish reason are one chunk."""

    def usage(self, usage: Usage) -> bytes:
        return self.head + b',"choices":[],"usage":' + encode_json(usage) + b"}\n\n"
