"""`POST /api/chat` and `POST /api/generate`, and their replies: lines of newline-delimited JSON, or one object.

Owns how events become messages: tool calls are whole, with their arguments as an object. Runs in the event loop that serves HTTP.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import msgspec

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate, failure_of
from headrace.grammar.schema_walk import with_one_of_as_any_of
from headrace.messages.outputs import FinishReason
from headrace.messages.requests import GenerateReqInput
from headrace.parsers.base import Arguments, Event, Reasoning, Text, ToolCall
from headrace.sampling.params import SamplingParams
from headrace.server.chat.calls import chat_call
from headrace.server.chat.choice_stream import ChoiceStream
from headrace.server.chat.conversation import unsupported
from headrace.server.context import ServingContext
from headrace.server.error_forms import ApiError, ollama_error, renaming
from headrace.server.http import Exchange, Headers, LongList, describe_error, encode_json, json_pieces
from headrace.server.infill import middle_of, stopping
from headrace.server.notes import HeaderNotes, OutputLimit
from headrace.server.ollama.chat_request import checked_think, conversation_of
from headrace.server.ollama.protocol import (
    HeadersOfNotes,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
    OllamaMessage,
    OllamaOptions,
    check_keep_alive,
    full_name,
    option_notes,
    read_body,
    sampling_params,
)
from headrace.server.openai.logprobs import places_of, token_logprob
from headrace.server.sse import stream_reply
from headrace.text.tokenizers import Tokenizer

NDJSON = b"application/x-ndjson"
Kind = Literal["chat", "generate"]

_ARGUMENTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class Part:
    """A piece of a message. tool_calls: complete ones."""

    content: str = ""
    thinking: str = ""
    tool_calls: list[object] = field(default_factory=list)


class PartJoiner:
    """Turns events into parts; a call is held until it is complete."""

    def __init__(self) -> None:
        self._call: ToolCall | None = None
        self._arguments: list[str] = []

    def push(self, events: Iterable[Event], ended: bool) -> list[Part]:
        """The parts that events complete. ended: nothing follows.

        A call whose arguments are no JSON object, because the output was cut off or the model wrote nonsense, is given as content.
        """
        parts: list[Part] = []
        for event in events:
            if isinstance(event, Arguments):
                self._arguments.append(event.text)
                continue
            parts += self._finished_call()
            match event:
                case Text(text):
                    parts.append(Part(content=text))
                case Reasoning(text):
                    parts.append(Part(thinking=text))
                case ToolCall():
                    self._call = event
        return parts + self._finished_call() if ended else parts

    def _finished_call(self) -> list[Part]:
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        if call is None:
            return []
        # Valid JSON has line breaks only between its tokens; a line of the stream must have none.
        arguments = (text.strip() or "{}").replace("\n", " ").replace("\r", " ")
        try:
            _ARGUMENTS.decode(arguments)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return [Part(content=f"{call.name} {text}")]
        function = {"index": call.index, "name": call.name, "arguments": msgspec.Raw(arguments.encode())}
        return [Part(tool_calls=[{"id": call.id, "function": function}])]


@dataclass(slots=True, eq=False)
class ReplyWriter:
    """Writes the reply to one request.

    model: as the client calls it. kind: where the text goes, into `message` or `response`. wants_logprobs: replies have `logprobs`.
    """

    model: str
    kind: Kind
    choice: ChoiceStream
    tokenizer: Tokenizer
    wants_logprobs: bool
    _joiner: PartJoiner = field(default_factory=PartJoiner)
    _start_ns: int = field(default_factory=time.monotonic_ns)

    def lines(self, update: SampleUpdate) -> bytes:
        """The lines of an update: one for each part, then the last one with the counts if the output has ended, or its error."""
        ended = update.finish is not None
        parts = self._joiner.push(self.choice.push(update), ended)
        logprobs = [*self._logprobs(update)]
        if logprobs and not parts:
            parts.append(Part())
        lines = [self._head() | self._body(part) | {"done": False} for part in parts]
        if logprobs:
            lines[-1]["logprobs"] = logprobs
        written = b"".join(encode_json(line) + b"\n" for line in lines)
        if update.finish is None:
            return written
        if (failure := failure_of(update.finish)) is not None:
            return written + error_line(describe_error(failure)[2])
        return written + encode_json(self._head() | self._body(Part()) | self._ending(update, update.finish)) + b"\n"

    def whole(self, update: SampleUpdate) -> dict[str, object]:
        """The reply of a request that does not stream. Raises HeadraceError for an output that failed."""
        assert update.finish is not None, "it has ended"
        update.raise_failure()
        parts = self._joiner.push(self.choice.push(update), True)
        joined = Part(
            "".join(part.content for part in parts),
            "".join(part.thinking for part in parts),
            [call for part in parts for call in part.tool_calls],
        )
        reply = self._head() | self._body(joined) | self._ending(update, update.finish)
        return reply | {"logprobs": LongList(self._logprobs(update))} if self.wants_logprobs else reply

    def unasked(self, reason: Literal["load", "unload"]) -> dict[str, object]:
        """The reply to a request without messages or prompt."""
        return self._head() | self._body(Part()) | {"done": True, "done_reason": reason}

    def _head(self) -> dict[str, object]:
        return {"model": self.model, "created_at": timestamp(time.time())}

    def _body(self, part: Part) -> dict[str, object]:
        more: dict[str, object] = {"thinking": part.thinking} if part.thinking else {}
        if part.tool_calls:
            more["tool_calls"] = part.tool_calls
        if self.kind == "generate":
            return {"response": part.content, **more}
        return {"message": {"role": "assistant", "content": part.content, **more}}

    def _ending(self, update: SampleUpdate, finish: FinishReason) -> dict[str, object]:
        return {
            "done": True,
            "done_reason": finish.type,
            "total_duration": time.monotonic_ns() - self._start_ns,
            "load_duration": 0,
            "prompt_eval_count": update.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(update.times.prompt_s),
            "eval_count": update.usage.completion_tokens,
            "eval_duration": _nanoseconds(update.times.output_s),
        }

    def _logprobs(self, update: SampleUpdate) -> Iterator[dict[str, object]]:
        if not self.wants_logprobs or update.logprobs is None:
            return
        for token, others in places_of(update.logprobs.output):
            shown = token_logprob(self.tokenizer, token)
            if others:
                shown["top_logprobs"] = [token_logprob(self.tokenizer, other) for other in others]
            yield shown


def error_line(error: ApiError) -> bytes:
    """The line that reports a failure after the reply has begun."""
    return ollama_error(500, error) + b"\n"


def timestamp(seconds: float) -> str:
    """Seconds since 1970 as Ollama writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by it."""
    return max(1, round(seconds * 1e9))


MAX_LOGPROBS = 20

_renamed = renaming(
    {
        "max_new_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
        "input_ids": "prompt",
        "json_schema": "format",
        "response_format": "format",
    }
)
_NOT_SUPPORTED = ("template", "context", "width", "height", "steps")
_INSTEAD = {
    "template": "; raw takes a prompt that is complete",
    "context": "; send the conversation to /api/chat",
}
_JSON_OBJECT: dict[str, object] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class _Run:
    """A request that is ready to be generated. choice: the reader of its output. limit: of its tokens."""

    id: str
    updates: AsyncGenerator[SampleUpdate, None]
    choice: ChoiceStream
    limit: OutputLimit


async def chat(noted: HeaderNotes, exchange: Exchange) -> None:
    """The next message of a conversation."""
    body, headers_of = await read_body(noted, exchange, OllamaChatRequest)
    if not body.messages:
        await _reply_unasked(exchange, body, "chat", headers_of)
        return
    try:
        exchange.context.check_tokenizer("messages")
        run = await _chat_run(exchange, body, body.messages, body.tools or [])
        await _reply(exchange, body, "chat", run, headers_of)
    except RequestError as error:
        raise _renamed(error) from None


async def generate(noted: HeaderNotes, exchange: Exchange) -> None:
    """What follows a prompt: as the user's only message, or with `raw` as it is. So it is for models without a chat template, too.

    With a suffix: what belongs between the two.
    """
    body, headers_of = await read_body(noted, exchange, OllamaGenerateRequest)
    for name in _NOT_SUPPORTED:
        if getattr(body, name) not in (None, "", [], 0):
            raise unsupported(name, f"{name} is not supported{_INSTEAD.get(name, '')}")
    if not body.prompt and not body.suffix:
        await _reply_unasked(exchange, body, "generate", headers_of)
        return
    is_raw = body.raw or body.suffix or (exchange.context.model.chat_template is None and not body.system)
    try:
        exchange.context.check_tokenizer("prompt")
        if is_raw and body.images:
            raise RequestError("images: a raw prompt takes none; they need a chat template", "images")
        if is_raw:
            run = await _raw_run(exchange, body, body.prompt or "")
        else:
            messages = [OllamaMessage(role="system", content=body.system)] if body.system else []
            messages.append(OllamaMessage(role="user", content=body.prompt or "", images=body.images))
            run = await _chat_run(exchange, body, messages, [])
        await _reply(exchange, body, "generate", run, headers_of)
    except RequestError as error:
        raise _renamed(error) from None


async def _reply_unasked(exchange: Exchange, body: OllamaGeneration, kind: Kind, headers_of: HeadersOfNotes) -> None:
    """A request for nothing loads a model in Ollama, or unloads it with keep_alive 0. Here it is always loaded."""
    exchange.context.adapter_of(body.model)
    check_keep_alive(body.keep_alive)
    unloads = body.keep_alive in (0, "0", "0s", "0m", "0h")
    reply = _writer(exchange.context, body, kind, ChoiceStream(None, None)).unasked("unload" if unloads else "load")
    await exchange.reply_json(reply, headers=headers_of(option_notes(body.options, exchange.context)))


async def _chat_run(
    exchange: Exchange, body: OllamaGeneration, messages: list[OllamaMessage], tools: list[dict[str, object]]
) -> _Run:
    context, model, run_id = exchange.context, exchange.context.model, _new_id()
    adapter = context.adapter_of(body.model)
    reasons = model.output_format is not None and model.output_format.has_reasoning
    think = checked_think(body.think, reasons)
    call = await chat_call(
        context,
        await context.beside_others(lambda: conversation_of(messages, tools, think, model.context_length)),
        _sampling(context, body),
        rid=run_id,
        stream=body.stream is not False,
        lora_path=adapter,
        **_logprob_options(body),
    )
    has_no_limit = body.options is not None and body.options.num_predict is not None
    return _Run(run_id, call.updates(exchange, may_fill_context=has_no_limit), call.choice(), call.limit)


async def _raw_run(exchange: Exchange, body: OllamaGenerateRequest, prompt: str) -> _Run:
    context, run_id = exchange.context, _new_id()
    if body.system:
        raise RequestError("system: a raw prompt has no system message", "system")
    if body.think:
        raise RequestError("think: a raw prompt decides itself whether the model reasons", "think")
    adapter = context.adapter_of(body.model)
    context.check_text_length("prompt", len(prompt))
    sampling = _sampling(context, body)
    tokenizer, middle = context.model.tokenizer, await middle_of(context, body.suffix) if body.suffix else None
    ids: Any = await context.in_text_thread(lambda: tokenizer.encode(prompt, middle is None, middle is None))
    if middle is not None:
        ids, sampling = middle.around(ids), stopping(sampling, middle.how)
    length = context.model.context_length
    limit, room = OutputLimit(sampling.max_new_tokens, length), length - len(ids)
    if limit.asked is not None and limit.asked > room > 0:
        sampling = msgspec.structs.replace(sampling, max_new_tokens=room)
        limit.lowered_to = room
    call = GenerateReqInput(
        input_ids=list(ids),
        sampling_params=sampling,
        rid=run_id,
        stream=body.stream is not False,
        lora_path=adapter,
        **_logprob_options(body),
    )
    updates = context.frontend.generate_request(call, default_max_new_tokens=length, caller=exchange.caller)
    return _Run(run_id, updates, ChoiceStream(None, None), limit)


def _sampling(context: ServingContext, body: OllamaGeneration) -> SamplingParams:
    """Also checks the fields that have no effect. Raises RequestError."""
    check_keep_alive(body.keep_alive)
    return sampling_params(body.options or OllamaOptions(), context.model.sampling_defaults, _json_schema(body.format))


async def _reply(exchange: Exchange, body: OllamaGeneration, kind: Kind, run: _Run, headers_of: HeadersOfNotes) -> None:
    exchange.name_request(run.id)

    def headers() -> Headers:
        return headers_of([*option_notes(body.options, exchange.context), *run.limit.notes("options.num_predict")])

    writer = _writer(exchange.context, body, kind, run.choice)
    if body.stream is not False:
        await stream_reply(
            exchange,
            run.updates,
            writer.lines,
            bytes,
            done=b"",
            failed=error_line,
            renamed=_renamed,
            headers=headers,
            content_type=NDJSON,
            ping=b"",
        )
        return
    (update,) = await exchange.all_of(run.updates)
    async with exchange.until_client_leaves():
        whole = await exchange.context.written(partial(writer.whole, update), update.num_bytes + len(update.text))
        await exchange.reply_in_pieces(json_pieces(whole), headers(), [update])


def _writer(context: ServingContext, body: OllamaGeneration, kind: Kind, choice: ChoiceStream) -> ReplyWriter:
    name = body.model or full_name(context.model.name)
    return ReplyWriter(name, kind, choice, context.model.tokenizer, bool(body.logprobs))


def _new_id() -> str:
    return f"ollama-{uuid.uuid4().hex}"


def _json_schema(asked: str | dict[str, object] | None) -> dict[str, object] | None:
    """What `format` asks for; None = any text."""
    match asked:
        case None | "":
            return None
        case "json":
            return _JSON_OBJECT
        case str():
            raise RequestError(f'format must be "json" or a JSON schema (an object), got {asked[:50]!r}', "format")
        case _:
            return with_one_of_as_any_of(asked) or None


def _logprob_options(body: OllamaGeneration) -> dict[str, Any]:
    count = body.top_logprobs or 0
    if count and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    if not 0 <= count <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {count}", "top_logprobs")
    if not body.logprobs:
        return {}
    return {"return_logprob": True, "top_logprobs_num": count, "return_text_in_logprobs": True}
