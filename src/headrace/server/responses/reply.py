"""The response object and the stream that leads to it: events of the model's output as items, and as the events of the stream. A reply that is not
streamed is written in the same way, and only its frames are dropped. Runs in the event loop that serves HTTP.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from headrace.frontend.sample_update import SampleUpdate, failure_of
from headrace.messages.outputs import FinishReason
from headrace.parsers.base import Arguments, Event, Reasoning, Text, ToolCall
from headrace.server.chat.calls import ChatCall
from headrace.server.chat.custom_tools import InputReader
from headrace.server.error_forms import ApiError
from headrace.server.http import LongList, describe_error, encode_json
from headrace.server.openai.logprobs import chat_logprobs, places_of
from headrace.server.responses.protocol import ReasoningOptions, ResponsesRequest, TextFormat
from headrace.server.responses.request import CalledTool, OfferedTools, is_server_run

_ABORTED = ApiError("the request was aborted", "server_error", None, None)

Status = Literal["in_progress", "completed", "incomplete"]
Fields = dict[str, object]


class EventNumbers:
    """Frames of a stream's events, numbered from 0 without gaps."""

    def __init__(self) -> None:
        self._next = 0

    def frame(self, kind: str, fields: bytes) -> bytes:
        """The event `kind`. fields: JSON without braces, not empty."""
        number, self._next, name = self._next, self._next + 1, kind.encode()
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (name, name, number, fields)


def _inner(fields: Fields) -> bytes:
    return encode_json(fields)[1:-1]


class _OpenItem(ABC):
    """An item that is being written. place: its index in the output. texts: its whole text so far, in pieces."""

    id_prefix = ""
    delta_event = ""
    done_event = ""
    has_logprobs = False

    def __init__(self, numbers: EventNumbers, place: int) -> None:
        self.numbers = numbers
        self.place = place
        self.id = f"{self.id_prefix}_{uuid.uuid4().hex}"
        self.texts: list[str] = []
        self.logprobs: list[Fields] = []
        at: Fields = {"item_id": self.id, "output_index": place}
        self.at = _inner(at | {"content_index": 0} if self.part() else at)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @abstractmethod
    def item(self, status: Status, *, is_new: bool = False) -> Fields:
        """The item. is_new: as it begins, without a part."""

    @abstractmethod
    def done(self) -> Fields:
        """Fields of the event with the whole text."""

    def part(self) -> Fields:
        """The only part of its content; empty = it has no parts."""
        return {}

    def open(self) -> bytes:
        added = {"output_index": self.place, "item": self.item("in_progress", is_new=True)}
        frames = self.numbers.frame("response.output_item.added", _inner(added))
        if part := self.part():
            frames += self._event("response.content_part.added", {"part": part})
        return frames

    def add(self, text: str, logprobs: Sequence[Fields] = ()) -> bytes:
        if not text:
            return b""
        self.texts.append(text)
        self.logprobs += logprobs
        more: Fields = {"logprobs": logprobs} if self.has_logprobs else {}
        return self._event(self.delta_event, {"delta": text, **more})

    def close(self, status: Status) -> bytes:
        frames = self._event(self.done_event, self.done())
        if part := self.part():
            frames += self._event("response.content_part.done", {"part": part})
        done = {"output_index": self.place, "item": self.item(status)}
        return frames + self.numbers.frame("response.output_item.done", _inner(done))

    def _event(self, kind: str, fields: Fields) -> bytes:
        return self.numbers.frame(kind, b"%b,%b" % (self.at, _inner(fields)))


class _Message(_OpenItem):
    id_prefix = "msg"
    delta_event = "response.output_text.delta"
    done_event = "response.output_text.done"
    has_logprobs = True

    def part(self) -> Fields:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": LongList(self.logprobs)}

    def done(self) -> Fields:
        return {"text": self.text, "logprobs": self.logprobs}

    def item(self, status: Status, *, is_new: bool = False) -> Fields:
        content = [] if is_new else [self.part()]
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


class _Reasoning(_OpenItem):
    id_prefix = "rs"
    delta_event = "response.reasoning_text.delta"
    done_event = "response.reasoning_text.done"

    def part(self) -> Fields:
        return {"type": "reasoning_text", "text": self.text}

    def done(self) -> Fields:
        return {"text": self.text}

    def item(self, status: Status, *, is_new: bool = False) -> Fields:
        content = [] if is_new else [self.part()]
        return {
            "type": "reasoning",
            "id": self.id,
            "status": status,
            "summary": [],
            "content": content,
            "encrypted_content": None,
        }


class _FunctionCall(_OpenItem):
    id_prefix = "fc"
    type = "function_call"
    text_field = "arguments"
    delta_event = "response.function_call_arguments.delta"
    done_event = "response.function_call_arguments.done"

    def __init__(self, numbers: EventNumbers, place: int, call_id: str, tool: CalledTool) -> None:
        super().__init__(numbers, place)
        self.call_id = call_id
        self.tool = tool

    def done(self) -> Fields:
        return {"name": self.tool.name, self.text_field: self.text}

    def item(self, status: Status, *, is_new: bool = False) -> Fields:
        item: Fields = {"type": self.type, "id": self.id, "status": status, "call_id": self.call_id, **self.done()}
        return item if self.tool.namespace is None else item | {"namespace": self.tool.namespace}


class _CustomCall(_FunctionCall):
    id_prefix = "ctc"
    type = "custom_tool_call"
    text_field = "input"
    delta_event = "response.custom_tool_call_input.delta"
    done_event = "response.custom_tool_call_input.done"

    def __init__(self, numbers: EventNumbers, place: int, call_id: str, tool: CalledTool) -> None:
        super().__init__(numbers, place, call_id, tool)
        self.reader = InputReader()

    def add(self, text: str, logprobs: Sequence[Fields] = ()) -> bytes:
        return super().add(self.reader.push(text))

    def close(self, status: Status) -> bytes:
        rest = super().add(self.reader.finish())
        return rest + super().close(status)


class OutputWriter:
    """Writes items from events. items: those that are complete, as the response object has them.

    has_marks: tokens may be no part of a text, and come one by one.
    """

    def __init__(self, numbers: EventNumbers, tools: OfferedTools, has_marks: bool) -> None:
        self.items: list[Fields] = []
        self._numbers = numbers
        self._tools = tools
        self._has_marks = has_marks
        self._open: _OpenItem | None = None
        # Logprobs whose text has not come yet.
        self._logprobs: list[Fields] = []

    def push(self, events: Sequence[Event], logprobs: Sequence[Fields] = ()) -> bytes:
        """The frames of the next events. logprobs: of the tokens behind them; those of a token that is no text are dropped."""
        self._logprobs += logprobs
        return b"".join([self._event(event) for event in events])

    def finish(self, status: Status) -> bytes:
        """The frames that end the output. status: of the item that is being written."""
        if isinstance(self._open, _Message):
            self._open.logprobs += self._logprobs
        return self._close(status)

    def _event(self, event: Event) -> bytes:
        if not isinstance(event, Text):
            self._logprobs.clear()
        match event:
            case Text(text):
                return self._within(_Message) + self._added(text, self._behind(text))
            case Reasoning(text):
                return self._within(_Reasoning) + self._added(text)
            case ToolCall(_, call_id, name):
                tool = self._tools.called_as(name)
                return self._begin(_CustomCall if tool.is_custom else _FunctionCall, call_id, tool)
            case Arguments(_, text):
                assert isinstance(self._open, _FunctionCall), "the arguments of a call follow it"
                return self._added(text)

    def _behind(self, text: str) -> list[Fields]:
        """The logprobs that have come with a text: of the last tokens that have as many bytes; those before it were marks."""
        waiting, self._logprobs = self._logprobs, []
        if not self._has_marks:
            return waiting
        first, missing = len(waiting), len(text.encode(errors="replace"))
        while first > 0 and missing > 0:
            first -= 1
            raw = waiting[first]["bytes"]
            missing -= len(raw) if isinstance(raw, list) else 0
        return waiting[first:]

    def _within(self, kind: type[_Message | _Reasoning]) -> bytes:
        """The frames that begin an item of this kind, unless it is open."""
        return b"" if isinstance(self._open, kind) else self._begin(kind)

    def _begin(self, kind: Callable[..., _OpenItem], *about: object) -> bytes:
        frames = self._close("completed")
        self._open = kind(self._numbers, len(self.items), *about)
        return frames + self._open.open()

    def _added(self, text: str, logprobs: Sequence[Fields] = ()) -> bytes:
        assert self._open is not None, "something is open"
        return self._open.add(text, logprobs)

    def _close(self, status: Status) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        frames = item.close(status)
        self.items.append(item.item(status))
        return frames


class ResponseReply:
    """Writes one response from the updates of its sample. The same calls write a stream and a whole reply, which drops the frames.

    is_stored: whether the response will be kept.
    """

    def __init__(
        self, response_id: str, request: ResponsesRequest, chat: ChatCall, tools: OfferedTools, is_stored: bool
    ) -> None:
        self._request = request
        self._context = chat.context
        self._numbers = EventNumbers()
        self._is_text = chat.format is None
        self._output = OutputWriter(self._numbers, tools, has_marks=not self._is_text)
        self._choice = chat.choice()
        self._has_begun = False
        self._usage: Fields | None = None
        self._finish: FinishReason | None = None
        self._error: Fields | None = None
        self._completed_at: int | None = None
        self._fixed = _fixed_fields(request, response_id, chat.context.shown_model(request.model), is_stored)

    def push(self, update: SampleUpdate) -> bytes:
        """The frames of an update; the first also begins the stream."""
        frames = b"" if self._has_begun else self._begin()
        if self._request.wants_logprobs:
            frames += self._push_with_logprobs(update)
        else:
            frames += self._output.push(self._choice.push(update))
        if update.finish is not None:
            self._finish = update.finish
            self._usage = self._usage_of(update)
        return frames

    def end(self) -> bytes:
        """The frames after the last update."""
        finish = self._finish
        assert finish is not None, "the sample has ended"
        failure = failure_of(finish)
        if failure is not None:
            return self.failed(describe_error(failure)[2])
        if finish.type == "abort":
            return self.failed(_ABORTED)
        if finish.type == "stop":
            self._completed_at = int(time.time())
        frames = self._output.finish("completed" if finish.type == "stop" else "incomplete")
        return frames + self._last_event()

    def failed(self, error: ApiError) -> bytes:
        """The frames that end the stream with an error."""
        frames = b"" if self._has_begun else self._begin()
        code = {"requests": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
        self._error = {"code": code.get(error.type, "server_error"), "message": error.message}
        return frames + self._output.finish("incomplete") + self._last_event()

    @property
    def status(self) -> str:
        if self._error is not None:
            return "failed"
        if self._finish is None:
            return "in_progress"
        return "incomplete" if self._finish.type == "length" else "completed"

    def response(self) -> Fields:
        status = self.status
        return self._fixed | {
            "status": status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._output.items),
            "usage": self._usage,
        }

    def _begin(self) -> bytes:
        self._has_begun = True
        response = b'"response":' + encode_json(self.response())
        return self._numbers.frame("response.created", response) + self._numbers.frame("response.in_progress", response)

    def _last_event(self) -> bytes:
        return self._numbers.frame(f"response.{self.status}", b'"response":' + encode_json(self.response()))

    def _usage_of(self, update: SampleUpdate) -> Fields:
        usage = update.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens if self._context.args.enable_cache_report else 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._choice.num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _push_with_logprobs(self, update: SampleUpdate) -> bytes:
        """The frames of an update, each token for itself, so that those of the reasoning can be told from those of the text."""
        logprobs = self._logprobs(update)
        if self._is_text or not update.ids:
            return self._output.push(self._choice.push(update), logprobs)
        # The text first; it waits for its tokens.
        frames = self._output.push(self._choice.push(msgspec.structs.replace(update, ids=[], finish=None)))
        last = len(update.ids) - 1
        for number, (token_id, logprob) in enumerate(zip(update.ids, logprobs, strict=True)):
            finish = update.finish if number == last else None
            one = msgspec.structs.replace(update, ids=[token_id], text="", finish=finish)
            frames += self._output.push(self._choice.push(one), [logprob])
        return frames

    def _logprobs(self, update: SampleUpdate) -> list[Fields]:
        assert update.logprobs is not None, "they were requested"
        places = places_of(update.logprobs.output, self._request.top_logprobs or 0)
        return [*chat_logprobs(self._context.model.tokenizer, places)]


def _fixed_fields(request: ResponsesRequest, response_id: str, model: str, is_stored: bool) -> Fields:
    """The fields that do not change: what the request asked for."""
    text_format = request.text.format if request.text is not None else None
    asked_format = msgspec.structs.asdict(text_format or TextFormat())
    shown_format = {"type": "text"} | {name: value for name, value in asked_format.items() if value is not None}
    reasoning = request.reasoning or ReasoningOptions()
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id or None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": request.temperature,
        "text": {"format": shown_format, "verbosity": "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": [{"type": "function"} | tool for tool in request.tools or () if not is_server_run(tool)],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }
