"""Messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Owns how a body becomes a call of the engine, with pins for marks of `cache_control`, and its reply: a whole message, or the events of a stream,
both from the events of the output. Runs in the event loop that serves HTTP.
"""

import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from headrace.errors import ContextLengthError, RequestError
from headrace.frontend.pins import PinAsk
from headrace.frontend.sample_update import SampleUpdate, SampleUsage, failure_of
from headrace.messages.bodies import is_empty
from headrace.messages.outputs import FinishReason
from headrace.parsers.base import Arguments, Event, Reasoning, Text, ToolCall
from headrace.server.anthropic.protocol import (
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    PromptRequest,
    refuse_unsupported,
)
from headrace.server.anthropic.request import conversation_of, sampling_of
from headrace.server.chat.calls import chat_call
from headrace.server.chat.choice_stream import ChoiceStream
from headrace.server.chat.conversation import Conversation, arguments_of, refused
from headrace.server.chat.prompt import ChatPrompt, chat_prompt
from headrace.server.context import Asker, ServingContext
from headrace.server.error_forms import ApiError, anthropic_error
from headrace.server.http import Exchange, Headers, encode_json
from headrace.server.notes import noted_fields, skipped_tools
from headrace.server.sse import stream_reply

SIGNATURE = "headrace"
"""The signature of every thinking block. Clients want one; nobody checks it."""

_THEIR_NAMES = {
    "max_new_tokens": "max_tokens",
    "input_ids": "messages",
    "text": "messages",
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
}
"""What this API calls our sampling parameters and prompts."""


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    """Why a request failed."""

    type: str
    message: str


class AnthropicErrorReply(msgspec.Struct, frozen=True):
    """Body of every failing reply of these routes; `type` is `error`."""

    type: str
    error: AnthropicErrorDetail


class MessagesServing:
    def __init__(self, context: ServingContext) -> None:
        self.context = context
        self._skipped_tools, self._noted = skipped_tools(), noted_fields()

    async def create(self, exchange: Exchange) -> None:
        """Answer one message. Errors name the fields as this API spells them."""
        request = await exchange.read_json(MessagesRequest)
        try:
            adapter = self.context.adapter_of(request.model)
            conversation, skipped = await self._conversation(request)
            message_id = request.rid if request.rid is not None else f"msg_{uuid.uuid4().hex[:24]}"
            chat = await chat_call(
                self.context,
                conversation,
                sampling_of(request),
                rid=message_id,
                stream=bool(request.stream),
                priority=request.priority,
                cache_salt=request.cache_salt,
                lora_path=adapter,
                session_params=request.session_params,
            )
            exchange.name_request(message_id)

            def headers() -> Headers:
                noted = chat.notes("max_tokens", "thinking.budget_tokens")
                return self._skipped_tools.headers(skipped) + self._noted.headers(noted)

            pins: tuple[PinAsk, ...] = ()
            if self.context.args.anthropic_cache_control == "pin":
                pins = await pins_of(self.context, exchange, request, chat.prompt)
            page_size = self.context.model.ready.page_size
            num_kept = max((pin.num_tokens for pin in pins), default=0) // page_size * page_size
            model = self.context.shown_model(request.model)
            reply = MessageReply(message_id, model, chat.choice(), request.shows_thinking, num_kept)
            updates = chat.updates(exchange, pins=pins)
            if request.stream:
                await stream_reply(
                    exchange,
                    updates,
                    reply.push,
                    bytes,
                    done=b"",
                    failed=error_event,
                    renamed=lambda exc: _renamed(exc, request),
                    headers=headers,
                    ping=PING,
                )
                return
            (update,) = await exchange.all_of(updates)
            await exchange.reply_json(reply.whole(update), headers=headers())
        except RequestError as exc:
            raise _renamed(exc, request) from None

    async def count_tokens(self, exchange: Exchange) -> None:
        """The number of tokens of a message's prompt: exactly what the message itself would count."""
        request = await exchange.read_json(CountTokensRequest)
        try:
            self.context.adapter_of(request.model)
            conversation, skipped = await self._conversation(request)
            prompt = await self.context.in_text_thread(lambda: chat_prompt(self.context, conversation))
            num_tokens = len(await prompt.ids_with_media(self.context, exchange))
        except RequestError as exc:
            raise _renamed(exc, request) from None
        await exchange.reply_json({"input_tokens": num_tokens}, headers=self._skipped_tools.headers(skipped))

    async def _conversation(self, request: PromptRequest) -> tuple[Conversation, list[str]]:
        def read() -> tuple[Conversation, list[str]]:
            self.context.check_tokenizer("messages")
            refuse_unsupported(request)
            return conversation_of(request, self.context.model.context_length)

        return await self.context.beside_others(read)


def _renamed(exc: RequestError, request: PromptRequest) -> RequestError:
    """The error with our own parameter names replaced by this API's, and with the words by which clients know that the prompt is too long."""
    schema = "output_config.format.schema" if request.output_format is None else "output_format.schema"
    theirs = (_THEIR_NAMES | {"json_schema": schema, "response_format": schema}).get(exc.param or "")
    if exc.param is not None and theirs is not None:
        # The rest of the message may quote a grammar, and stays as it is.
        exc.message = re.sub(rf"\b{exc.param}\b", theirs, exc.message, count=1)
        exc.param = theirs
    if isinstance(exc, ContextLengthError):
        exc.message = f"prompt is too long: {exc.message}"
    return exc


def tool_use_id(call_id: str) -> str:
    """The id of a call, as Anthropic writes it. Ids that the model's format needs in the history stay as they are."""
    return "toolu_" + call_id.removeprefix("call_") if call_id.startswith("call_") else call_id


def usage_of(usage: SampleUsage, num_thinking_tokens: int, num_kept: int = 0) -> dict[str, object]:
    """Token counts. `input_tokens` are those that were not in the prefix cache, nor among the first `num_kept`, which are pinned."""
    num_created = max(0, num_kept - usage.cached_tokens)
    counts: dict[str, object] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - num_created,
        "cache_creation_input_tokens": num_created,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if num_thinking_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": num_thinking_tokens}
    return counts


def reason_of(finish: FinishReason, choice: ChoiceStream) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`. Raises the error of a sample that failed or was aborted."""
    match finish.type:
        case "abort":
            raise failure_of(finish) or RequestError("the message was aborted")
        case "length":
            return "max_tokens", None
        case "stop" if isinstance(finish.matched, str):
            return "stop_sequence", finish.matched
        case _:
            return ("tool_use" if choice.has_calls else "end_turn"), None


def content_of(events: Iterable[Event], shows_thinking: bool) -> list[dict[str, Any]]:
    """The blocks of a whole reply. shows_thinking: false leaves the text of thinking blocks empty."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        kind = blocks[-1]["type"] if blocks else ""
        match event:
            case Text(text):
                if kind != "text":
                    blocks.append({"type": "text", "text": ""})
                blocks[-1]["text"] += text
            case Reasoning(text):
                if kind != "thinking":
                    blocks.append({"type": "thinking", "thinking": "", "signature": SIGNATURE})
                blocks[-1]["thinking"] += text if shows_thinking else ""
            case ToolCall(_, call_id, name):
                blocks.append({"type": "tool_use", "id": tool_use_id(call_id), "name": name, "input": ""})
            case Arguments(_, text):
                blocks[-1]["input"] += text
    return [block | {"input": arguments_of(block["input"])} if "input" in block else block for block in blocks]


def frame(kind: bytes, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind, data)


PING = frame(b"ping", b'{"type":"ping"}')
"""The event of a stream that has nothing to say."""

_STATUS = {
    "invalid_request_error": 400,
    "not_found_error": 404,
    "requests": 429,
    "tokens": 429,
    "overloaded_error": 503,
}
"""The status of an error by its type; others have 500."""


def error_event(error: ApiError) -> bytes:
    """The event that reports a failure after the reply has begun."""
    return frame(b"error", anthropic_error(_STATUS.get(error.type, 500), error))


class MessageReply:
    """Writes one message, whole or as the events of a stream, in which at most one block is open at a time.

    model: its name, as the reply says it. num_kept: tokens of the prompt that marks pin.
    """

    def __init__(
        self, message_id: str, model: str, choice: ChoiceStream, shows_thinking: bool, num_kept: int = 0
    ) -> None:
        self._num_kept = num_kept
        self._id = message_id
        self._model = model
        self._choice = choice
        self._shows_thinking = shows_thinking
        self._started = False
        self._num_blocks = 0
        # The type of the open block, "" = none is open.
        self._open = ""

    def whole(self, update: SampleUpdate) -> dict[str, object]:
        """The message of a reply that is not streamed, whose only update this is. Raises the error of a sample that failed or was aborted."""
        assert update.finish is not None, update
        content = content_of(self._choice.push(update), self._shows_thinking)
        reason, sequence = reason_of(update.finish, self._choice)
        counts = usage_of(update.usage, self._choice.num_reasoning_tokens, self._num_kept)
        return self._message(content, reason, sequence, counts)

    def push(self, update: SampleUpdate) -> bytes:
        """The frames of an update: with the first, the beginning of the message, with the last, its end."""
        parts: list[bytes] = []
        if not self._started:
            self._started = True
            usage = SampleUsage(update.usage.prompt_tokens, 0, update.usage.cached_tokens)
            start = {
                "type": "message_start",
                "message": self._message([], None, None, usage_of(usage, 0, self._num_kept)),
            }
            parts.append(frame(b"message_start", encode_json(start)))
        for event in self._choice.push(update):
            match event:
                case Text(text):
                    self._open_block(parts, "text", b'{"type":"text","text":""}')
                    parts.append(self._delta(b'{"type":"text_delta","text":%b}' % encode_json(text)))
                case Reasoning(text):
                    self._open_block(parts, "thinking", b'{"type":"thinking","thinking":"","signature":""}')
                    if self._shows_thinking:
                        parts.append(self._delta(b'{"type":"thinking_delta","thinking":%b}' % encode_json(text)))
                case ToolCall(_, call_id, name):
                    self._close_block(parts)
                    block = {"type": "tool_use", "id": tool_use_id(call_id), "name": name, "input": {}}
                    self._open_block(parts, "tool_use", encode_json(block))
                case Arguments(_, text):
                    parts.append(self._delta(b'{"type":"input_json_delta","partial_json":%b}' % encode_json(text)))
        if update.finish is not None:
            self._close_block(parts)
            reason, sequence = reason_of(update.finish, self._choice)
            delta = {"stop_reason": reason, "stop_sequence": sequence}
            counts = usage_of(update.usage, self._choice.num_reasoning_tokens, self._num_kept)
            end = {"type": "message_delta", "delta": delta, "usage": counts}
            parts.append(frame(b"message_delta", encode_json(end)))
            parts.append(frame(b"message_stop", b'{"type":"message_stop"}'))
        return b"".join(parts)

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: dict[str, object]
    ) -> dict[str, object]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _open_block(self, parts: list[bytes], kind: str, block: bytes) -> None:
        """Open a block, unless the open one is of this type."""
        if self._open == kind:
            return
        self._close_block(parts)
        self._open = kind
        data = b'{"type":"content_block_start","index":%d,"content_block":%b}' % (self._num_blocks, block)
        parts.append(frame(b"content_block_start", data))

    def _close_block(self, parts: list[bytes]) -> None:
        if not self._open:
            return
        if self._open == "thinking":
            signature = b'{"type":"signature_delta","signature":%b}' % encode_json(SIGNATURE)
            parts.append(self._delta(signature))
        stop = b'{"type":"content_block_stop","index":%d}' % self._num_blocks
        parts.append(frame(b"content_block_stop", stop))
        self._open = ""
        self._num_blocks += 1

    def _delta(self, delta: bytes) -> bytes:
        data = b'{"type":"content_block_delta","index":%d,"delta":%b}' % (self._num_blocks, delta)
        return frame(b"content_block_delta", data)


MOST_MARKS = 4
"""Of `cache_control` in a request (--anthropic-cache-control pin). Where one lies in the prompt is found by rendering the request up to there: both
prompts begin with the same tokens."""


async def pins_of(
    context: ServingContext, asker: Asker, request: MessagesRequest, prompt: ChatPrompt
) -> tuple[PinAsk, ...]:
    """What the marks of a request ask to keep. prompt: the request's. Raises RequestError for a mark that is none and media that cannot be read."""
    found = await context.in_text_thread(lambda: _ends(context, request, prompt.ids))
    return tuple(
        [
            PinAsk(ttl_s, await prompt.num_tokens(context, asker, end) if prompt.media else end, is_hint=True)
            for end, ttl_s in found.items()
        ]
    )


def _ends(context: ServingContext, request: MessagesRequest, ids: Sequence[int]) -> dict[int, float]:
    """With how many ids of its prompt a marked part of a request ends, and for how many seconds it shall be kept."""
    marks = list(_marks(request))
    if len(marks) > MOST_MARKS:
        raise refused("cache_control", f"marks {len(marks)} blocks; at most {MOST_MARKS} may be marked")
    found: dict[int, float] = {}
    for part, ttl_s in marks:
        if end := len(ids) if part is request else _common(context, part, ids):
            found[end] = max(ttl_s, found.get(end, 0.0))
    return found


def _marks(request: MessagesRequest) -> Iterator[tuple[MessagesRequest, float]]:
    """The request up to each mark, and the seconds that it names."""
    other = [InputMessage(role="user", content="-")]
    times = [_ttl_s(f"tools[{number}]", tool.cache_control) for number, tool in enumerate(request.tools or ())]
    if any(times):
        yield msgspec.structs.replace(request, system=None, messages=other), max(times)
    system = request.system if isinstance(request.system, list) else []
    for number, block in enumerate(system):
        if ttl_s := _ttl_s(f"system[{number}]", block.cache_control):
            yield msgspec.structs.replace(request, system=system[: number + 1], messages=other), ttl_s
    for number, message in enumerate(request.messages):
        blocks = message.content if isinstance(message.content, list) else []
        for place, given in enumerate(blocks):
            if ttl_s := _ttl_s(f"messages[{number}].content[{place}]", given.get("cache_control")):
                cut = msgspec.structs.replace(message, content=blocks[: place + 1])
                is_last = number == len(request.messages) - 1 and place == len(blocks) - 1
                part = msgspec.structs.replace(request, messages=[*request.messages[:number], cut])
                yield request if is_last else part, ttl_s
    if ttl_s := _ttl_s("", request.cache_control):
        yield request, ttl_s


def _ttl_s(where: str, mark: object) -> float:
    """0.0 = there is none."""
    match mark:
        case {"type": "ephemeral", **others} if others in ({}, {"ttl": None}, {"ttl": "5m"}):
            return 300.0
        case {"type": "ephemeral", "ttl": "1h", **others} if not others:
            return 3600.0
        case _ if is_empty(mark):
            return 0.0
    name = f"{where}.cache_control" if where else "cache_control"
    raise refused(name, 'must be {"type": "ephemeral"}, with ttl "5m" or "1h"')


def _common(context: ServingContext, part: MessagesRequest, ids: Sequence[int]) -> int:
    """With how many tokens both prompts begin; 0 if the part is no conversation by itself."""
    try:
        conversation, _ = conversation_of(part, context.model.context_length)
        theirs = chat_prompt(context, conversation).ids
    except RequestError:
        return 0
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, theirs, strict=False)))
