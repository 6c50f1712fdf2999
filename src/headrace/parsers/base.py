"""What a parser takes and gives: pieces of text with their tokens, and events. Nothing here knows a format."""

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

BLANK = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text, its content. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call begins. index: counts the calls of this output, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of a call's arguments. Never empty."""

    index: int
    text: str


Event = Text | Reasoning | ToolCall | Arguments


class Piece(NamedTuple):
    """A piece of an output.

    text: text that begins with the token `token_id`; -1: it continues the token before. A mark, a token that the format asked for by id
    (`OutputFormat.mark_ids`), has no text.
    """

    text: str
    token_id: int = -1


class CallSink(Protocol):
    """Where a reader of a call's text writes what it reads."""

    @property
    def has_begun(self) -> bool:
        """Whether the call's name is known and announced."""

    def begin(self, name: str = "") -> None:
        """The call begins. name: "" = the one that was read before this text."""

    def arguments(self, text: str) -> None:
        """The next piece of the JSON text of its arguments; may be empty."""


_SPACE = re.compile(f"[{BLANK}]*")

Steps = Generator[None, None, None]
Result = Generator[None, None, str]


class Malformed(Exception):
    """What comes next does not belong to a call."""


class Reader:
    """Reads one structured text, such as the JSON object of a call, from its first character on.

    It is one generator, `_read`, which yields where the text ends and goes on with the next piece.
    status: `more` wants more text, `done` has read all that belongs to it, `broken` has met what cannot belong to it (Malformed).
    """

    def __init__(self, sink: CallSink) -> None:
        self.status = "more"
        self._sink = sink
        self._text = ""
        self._at = 0
        self._in_string = False
        self._held: list[str] = []
        self._reading = self._read()

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns the end of what was taken: all of it, unless status is no longer `more`."""
        self._text, self._at = text, at
        try:
            next(self._reading)
        except StopIteration:
            self.status = "done"
        except Malformed:
            self.status = "broken"
        return self._at

    def mark(self, text: str) -> bool:
        """A special token with this text comes next. Returns whether it is part of what is read, as its text."""
        raise NotImplementedError

    def finish(self) -> None:
        """The output ends here. Writes what was held back."""
        raise NotImplementedError

    def _read(self) -> Steps:
        raise NotImplementedError

    def _peek(self) -> Result:
        """The next character, which is not taken."""
        while self._at == len(self._text):
            yield
        return self._text[self._at]

    def _solid(self) -> Result:
        """The next character that is no blank, which is not taken."""
        while True:
            self._skip(_SPACE)
            if self._at < len(self._text):
                return self._text[self._at]
            yield

    def _expect(self, text: str) -> Steps:
        for character in text:
            if (yield from self._peek()) != character:
                raise Malformed
            self._at += 1

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Take what a pattern matches here; it may go on in the next piece."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def _word(self, pattern: re.Pattern[str]) -> Result:
        """Take all that a pattern matches, up to a character that is there; it is held meanwhile."""
        while True:
            yield from self._peek()
            if not (part := self._skip(pattern)):
                return self._release()
            self._held.append(part)

    def _release(self) -> str:
        """What is held, and is no longer."""
        text = "".join(self._held)
        self._held.clear()
        return text

    def _passed(self, steps: Steps, take: Callable[[str], None]) -> Steps:
        """A part of the text, which is given to `take` as it comes."""
        more = True
        while more:
            start = self._at
            try:
                more = next(steps, 0) is None
            finally:
                take(self._text[start : self._at])
            if more:
                yield
