"""The one machine that reads what models write: reasoning, content and calls, piece by piece.

It runs a `Program`. Every character ends in exactly one of content, reasoning, a name, arguments, or the format's own marks. Blanks that touch a
mark belong to it: those before and after a call, and at both ends of reasoning. What turns out to be no call goes to the content as it was
written (special tokens excepted). Text is read once: only a suffix that could begin a terminal waits for more.
"""

import random
import re
import string
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from headrace.parsers.base import BLANK, Arguments, Event, Piece, Reader, Reasoning, Text, ToolCall
from headrace.parsers.parameters import ArgumentsWriter
from headrace.parsers.program import BoundState, Program
from headrace.parsers.table import CallId, Go, Kind, NameReader, ToolSchemas, plain_name

_ALPHABET = string.ascii_letters + string.digits
_LONGEST_HEADER = 256
_SYSTEM_RANDOM = random.SystemRandom()

_WORD = re.compile(rf"[^{BLANK}]*")
_NO_WORD = re.compile(rf"[{BLANK}]*")
_FLOWING = frozenset({Kind.CONTENT, Kind.REASONING})


def random_characters(num: int) -> str:
    """Letters and digits that nobody can guess."""
    return "".join(_SYSTEM_RANDOM.choices(_ALPHABET, k=num))


class OutputParser:
    """Reads one output, piece by piece. What comes out does not depend on where the pieces are cut, apart from how the events are cut.

    schemas: the schema of each function's arguments. start: the name of the first state. reads_tools, reads_reasoning:
    what is not read is text. num_calls_before: calls earlier in the conversation. draw: random characters for ids.
    num_reasoning_tokens: tokens so far whose text begins in the reasoning; marks are not counted.
    """

    def __init__(
        self,
        program: Program,
        schemas: ToolSchemas,
        start: str,
        *,
        reads_tools: bool = True,
        reads_reasoning: bool = True,
        num_calls_before: int = 0,
        read_name: NameReader = plain_name,
        call_id: CallId | None = None,
        draw: Callable[[int], str] = random_characters,
    ) -> None:
        self._program = program
        self._schemas = schemas
        self._reads_tools = reads_tools
        self._reads_reasoning = reads_reasoning
        self._num_calls_before = num_calls_before
        self._read_name = read_name
        self._call_id = call_id or (lambda name, number, draw: "call_" + draw(24))
        self._draw = draw
        self.num_reasoning_tokens = 0
        self._num_calls = 0

        # Text that is not yet read: `_buffer` from `_at` on. Offsets of tokens count from the beginning of the output.
        self._buffer = ""
        self._at = 0
        self._base = 0
        self._end = 0
        self._token_starts: deque[int] = deque()

        # Where the text goes: (kind, index of the call), and its parts.
        self._out: list[tuple[str, int, list[str]] | ToolCall] = []
        self._blanks: list[str] = []
        self._after_mark = False

        # A call that has not begun: what it was read from, and where that goes if it is none.
        self._raw: list[str] = []
        self._origin = program.states["content"]
        self._held: list[str] = []
        self._name: str | None = None
        self._given_id = ""
        self._captures: Mapping[str, str] = {}
        self.has_begun = False
        self._has_arguments = False
        self._writer: ArgumentsWriter | None = None
        self._reader: Reader | None = None
        self._state = self._origin
        self._enter(start)
        self._after_mark = self._state.kind is Kind.REASONING

    @property
    def is_reasoning(self) -> bool:
        """Whether the next token would be reasoning."""
        return self._state.kind is Kind.REASONING and self._reads_reasoning

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    @property
    def in_call(self) -> bool:
        """Whether a call has begun that is not whole yet."""
        return self.has_begun

    def push(self, pieces: Iterable[Piece]) -> list[Event]:
        """The next pieces; returns what is certain by now. Adjacent events of the same kind are joined."""
        waiting: list[str] = []
        texts = self._program.texts
        for text, token_id in pieces:
            if not text and token_id in texts:
                if token_id in self._program.live:
                    self._run(waiting, is_end=True)
                    self._mark(token_id)
                    continue
                text = texts[token_id]
            if token_id >= 0:
                self._token_starts.append(self._end)
            if text:
                self._end += len(text)
                waiting.append(text)
        self._run(waiting, is_end=False)
        return self._take()

    def skip(self, text: str) -> None:
        """The prompt ends with this beginning of the output: it says in which state the rest begins. Texts of marks in it are marks."""
        if text:
            ids = {name: token_id for token_id, name in self._program.texts.items()}
            parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", text) if ids else [text]
            self.push(Piece("", ids[part]) if i % 2 else Piece(part) for i, part in enumerate(parts))
            self._blanks.clear()
            self._after_mark = True
            self._token_starts.clear()
            self.num_reasoning_tokens = 0

    def finish(self) -> list[Event]:
        """The end of the output: returns what was held back. Nothing may be pushed afterwards."""
        self._drop_cut_mark()
        self._run([], is_end=True)
        if self._reader is not None:
            self._reader.finish()
        elif self._state.kind is Kind.REGION:
            self._read_region("".join(self._held))
        if self._writer is not None:
            self.arguments(self._writer.cut("".join(self._held)))
        if not self.has_begun and self._raw:
            self._back_to(self._origin)
        if self._blanks and not self._after_mark:
            self._write(self._flow_kind(), "".join(self._blanks))
        if self._state.kind is Kind.REASONING:
            self._count(self._end + 1, self._reads_reasoning)
        return self._take()

    def _drop_cut_mark(self) -> None:
        """What is left of a mark in which the output was cut off, behind a call or between its parameters, is no content."""
        rest = self._buffer[self._at :].lstrip(BLANK)
        is_behind_call = not "".join(self._raw).strip(BLANK)
        if self._state.kind is Kind.SPACE and is_behind_call and rest in self._state.beginnings:
            self._advance(len(self._buffer))
            self._raw.clear()

    # What readers of calls write to (`CallSink`).

    def begin(self, name: str = "") -> None:
        """The call begins: what was read belongs to it. name: "" = the one that was read before."""
        name = name or self._name or ""
        self._boundary()
        self._raw.clear()
        self.has_begun = True
        self._has_arguments = False
        self._name = None
        index = self._num_calls
        self._num_calls += 1
        call_id = self._given_id or self._call_id(name, self._num_calls_before + index, self._draw)
        self._given_id = ""
        self._out.append(ToolCall(index, call_id, name))

    def arguments(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._write("arguments", text, self._num_calls - 1)

    # Reading.

    def _run(self, waiting: list[str], is_end: bool) -> None:
        """Read what waits, to the end if no terminal can go on behind it."""
        if waiting:
            self._buffer += "".join(waiting)
            waiting.clear()
        while self._at < len(self._buffer) and self._step(is_end):
            pass
        self._base += self._at
        self._buffer = self._buffer[self._at :]
        self._at = 0

    def _step(self, is_end: bool) -> bool:
        """Read the text up to the next change of state. Returns False if more must be known for one."""
        if self._reader is not None:
            return self._step_reader(self._reader)
        state, buffer, at = self._state, self._buffer, self._at
        found, stop = state.find(buffer, at, is_end)
        until = found.start if found is not None else stop
        if until > at:
            taken = self._text(buffer[at:until])
            self._advance(at + taken, state.kind is Kind.REASONING)
            if taken < until - at:
                return True  # another state reads on
        if found is None:
            return False
        if not found.go.keep:
            self._advance(found.end)
        if found.captures:
            self._captures = found.captures
        self._go(found.go, buffer[found.start : found.end])
        return True

    def _step_reader(self, reader: Reader) -> bool:
        start = self._at
        end = reader.feed(self._buffer, start)
        self._advance(end)
        if not self.has_begun and end > start:
            self._raw.append(self._buffer[start:end])
        return self._settle(reader)

    def _settle(self, reader: Reader) -> bool:
        """What follows from the status of a reader. Returns whether another state reads on."""
        if reader.status == "more":
            return False
        if not self.has_begun:
            self._back_to(self._origin)
            return True
        if reader.status == "broken":
            reader.finish()
        self._end_call()
        self._enter(self._state.table.then)
        return True

    def _text(self, text: str) -> int:
        """Text in a state without a reader. Returns how many characters belong there; before the others, the state has been changed."""
        match self._state.kind:
            case Kind.CONTENT | Kind.REASONING:
                self._flow(text)
            case Kind.VALUE:
                assert self._writer is not None
                self.arguments(self._writer.value(text))
            case Kind.ARGUMENTS:
                self.arguments(text)
            case Kind.KEY:
                self._held.append(text)
            case Kind.SPACE:
                return self._space(text)
            case Kind.NAME:
                return self._part_of_name(text)
            case Kind.HEADER:
                return self._part_of_header(text)
            case _:
                self._raw.append(text)
                self._held.append(text)
        return len(text)

    def _part_of_header(self, text: str) -> int:
        """A header is a short line."""
        room = _LONGEST_HEADER - sum(map(len, self._held))
        taken = min(len(text), room, *(at for at in (text.find("\n"),) if at >= 0))
        if taken:
            self._raw.append(text[:taken])
            self._held.append(text[:taken])
        if taken < len(text):
            self._malformed()
        return taken

    def _part_of_name(self, text: str) -> int:
        """A name is one word, with blanks around it."""
        taken = 0
        if not self._held:
            taken = len(text) - len(text.lstrip(BLANK))
        if taken < len(text):
            ended = bool(self._held) and self._held[-1][-1] in BLANK
            word = _WORD.match(text, taken)
            assert word is not None
            end = _NO_WORD.match(text, taken if ended else word.end())
            assert end is not None
            if end.end() > taken:
                self._held.append(text[taken : end.end()])
            taken = end.end()
        self._raw.append(text[:taken])
        if taken < len(text):
            self._malformed()
        return taken

    def _space(self, text: str) -> int:
        rest = text.lstrip(BLANK)
        taken = len(text) - len(rest)
        if not self.has_begun:
            self._raw.append(text[:taken])
        if rest:
            peek = self._state.table.peek
            to = peek.get(rest[0], peek.get(""))
            if to is None:
                self._malformed()
            else:
                self._enter(to)
        return taken

    def _mark(self, token_id: int) -> None:
        """A special token that is a terminal somewhere."""
        text = self._program.texts[token_id]
        if self._reader is not None:
            if self._reader.mark(text):
                if not self.has_begun:
                    self._raw.append(text)
                return
            self._reader.status = "broken"
            self._settle(self._reader)
        while True:
            go = self._state.marks.get(token_id)
            if go is not None:
                self._go(go, text, is_special=True)
                if go.keep:
                    continue
                return
            match self._state.kind:
                case Kind.CONTENT | Kind.REASONING:
                    return  # a mark out of place: never text
                case Kind.VALUE:
                    assert self._writer is not None
                    self.arguments(self._writer.value(text))
                    return
                case Kind.ARGUMENTS:
                    self.arguments(text)
                    return
                case _:
                    self._malformed()

    def _go(self, go: Go, text: str, is_special: bool = False) -> None:
        """A terminal, as it is written. is_special: it is a special token, which is never given back."""
        state = self._state
        given_back = "" if is_special or go.keep else text
        if given_back and state.kind not in _FLOWING and not self.has_begun:
            self._raw.append(given_back)
        if state.kind is Kind.HEADER and go.to == state.name:
            self._held.append(text)
            return
        held = "".join(self._held)
        self._held.clear()
        match state.kind:
            case Kind.NAME:
                name = self._read_name(held.strip(BLANK))
                if name is None:
                    return self._malformed()
                self._name = name
            case Kind.HEADER:
                assert state.table.read_header is not None
                header = state.table.read_header(held)
                if header is None:
                    return self._malformed()
                self._boundary()
                self._raw.clear()
                if header.call is not None and not self._reads_tools:
                    return self._enter("content")
                if header.call is not None:
                    self.begin(header.call)
                return self._enter(header.to)
            case Kind.ARGUMENTS if go.end and not self._has_arguments:
                self.arguments("{}")
            case Kind.REGION:
                if not self._read_region(held):
                    return self._malformed()
            case Kind.ID:
                self._given_id = held.strip(BLANK)
            case Kind.KEY:
                assert self._writer is not None
                self._writer.key(held)
            case Kind.VALUE:
                assert self._writer is not None
                self.arguments(self._writer.end_value())
            case _:
                pass
        to = self._program.states[go.to]
        if to.kind in _FLOWING or go.closes:
            self._raw.clear()
            self._boundary()
            self._origin = self._program.states["content"]
        elif state.kind in _FLOWING:
            self._origin = state
            if given_back:
                self._raw.append(given_back)
        if go.begin and self._name is not None:
            self._writer = ArgumentsWriter(self._schemas.get(self._name, {}))
            self.begin()
        if to.kind is Kind.VALUE:
            assert self._writer is not None
            self.arguments(self._writer.begin_value(go.value, to.table.trim_newline))
        if go.end:
            if self._writer is not None:
                self.arguments(self._writer.close())
            self._end_call()
        self._enter(go.to)

    def _read_region(self, text: str) -> bool:
        """The calls of a region; returns whether it has any."""
        assert self._state.table.read_calls is not None
        try:
            calls = self._state.table.read_calls(text, self._captures, self._schemas)
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        for name, arguments in calls:
            self.begin(name)
            self.arguments(arguments)
            self._end_call()
        return True

    def _enter(self, name: str) -> None:
        state = self._state = self._program.states[name]
        self._reader = state.table.reader(self) if state.table.reader is not None else None
        if state.kind in _FLOWING:
            self._origin = state

    def _end_call(self) -> None:
        self.has_begun = False
        self._writer = None
        self._reader = None
        self._name = None
        self._given_id = ""
        self._raw.clear()
        self._held.clear()
        self._origin = self._program.states["content"]

    def _malformed(self) -> None:
        """What comes does not belong here: give back what is no call, and read on as text."""
        if self.has_begun:
            left = self._held[:]
            if self._writer is not None:
                self.arguments(self._writer.close())
            self._end_call()
            self._raw += left
        self._back_to(self._origin)

    def _back_to(self, origin: BoundState) -> None:
        self._held.clear()
        self._reader = None
        self._name = None
        self._given_id = ""
        self._state = self._origin = origin
        raw = "".join(self._raw)
        self._raw.clear()
        if raw:
            self._flow(raw)

    # Writing.

    def _flow_kind(self) -> str:
        return "reasoning" if self._origin.kind is Kind.REASONING and self._reads_reasoning else "text"

    def _flow(self, text: str) -> None:
        """Content or reasoning. Blanks at its end wait: a mark takes those around it."""
        if self._after_mark:
            text = text.lstrip(BLANK)
            if not text:
                return
            self._after_mark = False
        solid = text.rstrip(BLANK)
        if solid:
            if self._blanks:
                solid = "".join(self._blanks) + solid
                self._blanks.clear()
            self._write(self._flow_kind(), solid)
            text = text[len(text.rstrip(BLANK)) :]
        if text:
            self._blanks.append(text)

    def _boundary(self) -> None:
        self._blanks.clear()
        self._after_mark = True

    def _write(self, kind: str, text: str, index: int = -1) -> None:
        last = self._out[-1] if self._out else None
        if isinstance(last, tuple) and last[0] == kind and last[1] == index:
            last[2].append(text)
        else:
            self._out.append((kind, index, [text]))

    def _take(self) -> list[Event]:
        if not self._out:
            return []
        events: list[Event] = []
        for item in self._out:
            if isinstance(item, ToolCall):
                events.append(item)
                continue
            kind, index, parts = item
            text = "".join(parts)
            if kind == "arguments":
                events.append(Arguments(index, text))
            else:
                events.append(Text(text) if kind == "text" else Reasoning(text))
        self._out.clear()
        return events

    # Counting.

    def _advance(self, at: int, is_reasoning: bool = False) -> None:
        """Everything before `at` has been read. is_reasoning: as reasoning."""
        self._at = at
        if self._token_starts:
            self._count(self._base + at, is_reasoning and self._reads_reasoning)

    def _count(self, end: int, is_reasoning: bool) -> None:
        """Tokens that begin before `end`."""
        starts = self._token_starts
        while starts and starts[0] < end:
            starts.popleft()
            self.num_reasoning_tokens += is_reasoning
