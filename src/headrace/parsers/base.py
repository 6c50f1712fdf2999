"""What a parser takes and gives: pieces of text with their tokens, and events. Nothing here knows a format."""

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


class Reader(Protocol):
    """Reads one structured text, such as the JSON object of a call, from its first character on.

    status: `more` wants more text, `done` has read all that belongs to it, `broken` has met what cannot belong to it.
    """

    status: str

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns the end of what was taken: all of it, unless status is no longer `more`."""

    def mark(self, text: str) -> bool:
        """A special token with this text comes next. Returns whether it is part of what is read, as its text."""

    def finish(self) -> None:
        """The output ends here. Writes what was held back."""
