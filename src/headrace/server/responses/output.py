"""The output of a response: events of the model's output as items, and as the events of a stream.

Owns the shapes of output items. A reply that is not streamed is written in the same way, and only its frames are dropped.
Runs in the event loop that serves HTTP.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from headrace.parsers.base import Arguments, Event, Reasoning, Text, ToolCall
from headrace.server.chat.custom_tools import InputReader
from headrace.server.http import encode_json
from headrace.server.responses.tools import CalledTool, OfferedTools

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


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class _OpenItem(ABC):
    """An item that is being written. place: its index in the output. text: its whole text so far, in pieces."""

    id_prefix = ""
    delta_event = ""
    delta_tail = b""

    def __init__(self, numbers: EventNumbers, place: int) -> None:
        self.numbers = numbers
        self.place = place
        self.id = _new_id(self.id_prefix)
        self.texts: list[str] = []
        self.at = _inner({"item_id": self.id, "output_index": place} | self.place_in_item())

    def place_in_item(self) -> Fields:
        """Fields of an event that say which part of the item it is about."""
        return {}

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.texts)

    @abstractmethod
    def item(self, status: Status, *, is_new: bool = False) -> Fields:
        """The item. is_new: as it begins, without a part."""

    def open(self) -> bytes:
        """The events with which it begins."""
        added = _inner({"output_index": self.place, "item": self.item("in_progress", is_new=True)})
        return self.numbers.frame("response.output_item.added", added)

    def add(self, text: str, logprobs: Sequence[Fields] = ()) -> bytes:
        """More text."""
        if not text:
            return b""
        self.texts.append(text)
        return self._delta(text, self.delta_tail)

    def _delta(self, text: str, tail: bytes) -> bytes:
        return self.numbers.frame(self.delta_event, b'%b,"delta":%b%b' % (self.at, encode_json(text), tail))

    def close(self, status: Status) -> bytes:
        """The events with which it ends."""
        done = _inner({"output_index": self.place, "item": self.item(status)})
        return self.numbers.frame("response.output_item.done", done)


class _PartItem(_OpenItem):
    """An item whose text is its only part."""

    done_event = ""

    def place_in_item(self) -> Fields:
        return {"content_index": 0}

    @abstractmethod
    def part(self) -> Fields:
        """The part."""

    def done(self) -> Fields:
        """Fields of the event with the whole text."""
        return {"text": self.text}

    def open(self) -> bytes:
        added = b"%b,%b" % (self.at, _inner({"part": self.part()}))
        return super().open() + self.numbers.frame("response.content_part.added", added)

    def close(self, status: Status) -> bytes:
        frames = self.numbers.frame(self.done_event, b"%b,%b" % (self.at, _inner(self.done())))
        frames += self.numbers.frame("response.content_part.done", b"%b,%b" % (self.at, _inner({"part": self.part()})))
        return frames + super().close(status)


class _Message(_PartItem):
    id_prefix = "msg"
    delta_event = "response.output_text.delta"
    delta_tail = b',"logprobs":[]'
    done_event = "response.output_text.done"

    def __init__(self, numbers: EventNumbers, place: int) -> None:
        super().__init__(numbers, place)
        self.logprobs: list[Fields] = []

    def add(self, text: str, logprobs: Sequence[Fields] = ()) -> bytes:
        if not logprobs:
            return super().add(text)
        self.logprobs += logprobs
        if not text:
            return b""
        self.texts.append(text)
        return self._delta(text, b',"logprobs":' + encode_json(logprobs))

    def part(self) -> Fields:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def done(self) -> Fields:
        return {"text": self.text, "logprobs": self.logprobs}

    def item(self, status: Status, *, is_new: bool = False) -> Fields:
        content = [] if is_new else [self.part()]
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


class _Reasoning(_PartItem):
    id_prefix = "rs"
    delta_event = "response.reasoning_text.delta"
    done_event = "response.reasoning_text.done"

    def part(self) -> Fields:
        return {"type": "reasoning_text", "text": self.text}

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
        self.call_id = call_id
        self.tool = tool
        super().__init__(numbers, place)

    def item(self, status: Status, *, is_new: bool = False) -> Fields:
        item: Fields = {"type": self.type, "id": self.id, "status": status, "call_id": self.call_id}
        item |= {"name": self.tool.name, self.text_field: self.text}
        return item if self.tool.namespace is None else item | {"namespace": self.tool.namespace}

    def close(self, status: Status) -> bytes:
        done: Fields = {"name": self.tool.name, self.text_field: self.text}
        frames = self.numbers.frame(self.done_event, b"%b,%b" % (self.at, _inner(done)))
        return frames + super().close(status)


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
        open_item, frames = self._open, b""
        if isinstance(open_item, _Message) and self._logprobs:
            frames = open_item.add("", self._logprobs)
        return frames + self._close(status)

    def _event(self, event: Event) -> bytes:
        if not isinstance(event, Text):
            self._logprobs.clear()
        match event:
            case Text(text):
                frames = b"" if isinstance(self._open, _Message) else self._begin(_Message(self._numbers, self._place))
                return frames + self._added(text, self._behind(text))
            case Reasoning(text):
                is_open = isinstance(self._open, _Reasoning)
                frames = b"" if is_open else self._begin(_Reasoning(self._numbers, self._place))
                return frames + self._added(text)
            case ToolCall(_, call_id, name):
                tool = self._tools.called_as(name)
                kind = _CustomCall if tool.is_custom else _FunctionCall
                return self._begin(kind(self._numbers, self._place, call_id, tool))
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

    @property
    def _place(self) -> int:
        """The index of the next item."""
        return len(self.items) + (self._open is not None)

    def _begin(self, item: _OpenItem) -> bytes:
        frames = self._close("completed")
        self._open = item
        return frames + item.open()

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
