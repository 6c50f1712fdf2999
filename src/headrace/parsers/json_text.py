"""JSON in an output, read as it comes and passed on byte for byte: a call's arguments, and the object around name and arguments."""

import json
import re
from collections.abc import Sequence
from typing import Literal

from headrace.parsers.base import CallSink
from headrace.parsers.parameters import without_surrogates

BLANK = " \t\r\n"
_SPACE = re.compile(f"[{BLANK}]*")
_IN_STRING = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r'[^"{}\[\]<]*')
_SCALAR = re.compile(rf'[^,}}\]{{\["<{BLANK}]*')


class JsonValue:
    """Finds the end of one JSON value by its brackets and strings; the value itself is not checked.

    status: `more`, `done`, or `broken` at a character that is in no JSON: `<` outside a string begins a mark.
    """

    def __init__(self) -> None:
        self.status = "more"
        self.first = ""
        self.in_string = False
        self._escaped = False
        self._depth = 0

    def feed(self, text: str, at: int) -> int:
        """Read on from `at`; returns the end of what belongs to the value. It begins without blanks."""
        size = len(text)
        if not self.first and at < size:
            self.first = text[at]
            if self.first in ",:}]<":
                self.status = "broken"
                return at
        while at < size and self.status == "more":
            if self.in_string:
                at = self._string(text, at)
            elif not self._depth and self.first not in '{["':
                return self._scalar(text, at)
            else:
                at = self._outside(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _IN_STRING.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self.in_string = False
            if not self._depth:
                self.status = "done"
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        """Outside a string, up to the next character that counts, and with it."""
        if self.first == '"' and not self._depth:
            self.in_string = True
            return at + 1
        found = _OUTSIDE.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        match text[at]:
            case "<":
                self.status = "broken"
                return at
            case '"':
                self.in_string = True
            case "{" | "[":
                self._depth += 1
            case _:
                self._depth -= 1
                if not self._depth:
                    self.status = "done"
        return at + 1

    def _scalar(self, text: str, at: int) -> int:
        found = _SCALAR.match(text, at)
        assert found is not None
        if found.end() < len(text):
            self.status = "done"
        return found.end()


class JsonArguments:
    """Reads the object of a call's arguments, whose name was read before; the call begins with its opening brace."""

    def __init__(self, sink: CallSink) -> None:
        self.status = "more"
        self._sink = sink
        self._value = JsonValue()

    def feed(self, text: str, at: int) -> int:
        """See `Reader`."""
        if not self._sink.has_begun:
            at = skip_blanks(text, at)
            if at == len(text):
                return at
            if text[at] != "{":
                self.status = "broken"
                return at
            self._sink.begin()
        end = self._value.feed(text, at)
        self._sink.arguments(text[at:end])
        self.status = self._value.status
        return end

    def mark(self, text: str) -> bool:
        """See `Reader`."""
        if self._value.in_string:
            self._sink.arguments(text)
        return self._value.in_string

    def finish(self) -> None:
        """See `Reader`."""
        if not self._sink.has_begun:
            self._sink.begin()


Place = Literal["object", "key", "in key", "colon", "value", "in value", "next"]


class JsonCall:
    """Reads `{"name": ..., "arguments": {...}}`, in either order, and passes the arguments on. What else is in the object is left out.

    argument_keys: names of the key of the arguments. is_bare: nothing but the object itself says that it is a call: it needs name and arguments.
    Arguments within a string, as some models write them, are those that the string holds.
    """

    def __init__(
        self, sink: CallSink, argument_keys: Sequence[str] = ("arguments", "parameters"), is_bare: bool = False
    ) -> None:
        self.status = "more"
        self._sink = sink
        self._argument_keys = argument_keys
        self._is_bare = is_bare
        self._place: Place = "object"
        self._name = ""
        self._key = ""
        self._value = JsonValue()
        self._held: list[str] = []
        self._arguments: str | None = None
        self._has_arguments = False

    def feed(self, text: str, at: int) -> int:
        """See `Reader`."""
        while self.status == "more" and at < len(text):
            if self._place in ("in key", "in value"):
                at = self._read_value(text, at)
                continue
            at = skip_blanks(text, at)
            if at < len(text):
                at = self._between(text, at)
        return at

    def mark(self, text: str) -> bool:
        """See `Reader`."""
        if self._place not in ("in key", "in value") or not self._value.in_string:
            return False
        self._take(text)
        return True

    def finish(self) -> None:
        """See `Reader`."""
        if not self._sink.has_begun and self._name and not self._is_bare:
            self._sink.begin(self._name)
            self._sink.arguments(self._arguments or "")
        if self._sink.has_begun and self._place == "in value" and self._key in self._argument_keys:
            self._sink.arguments("".join(self._held))

    def _between(self, text: str, at: int) -> int:
        """A character between keys and values."""
        character = text[at]
        match self._place, character:
            case "object", "{":
                self._place = "key"
            case ("key", '"'):
                self._begin_value("in key")
                return at
            case ("colon", ":"):
                self._place = "value"
            case "value", _:
                self._begin_value("in value")
                return at
            case "next", ",":
                self._place = "key"
            case (("next" | "key"), "}"):
                return at + self._end_object()
            case _:
                self.status = "broken"
                return at
        return at + 1

    def _begin_value(self, place: Place) -> None:
        self._place = place
        self._value = JsonValue()

    def _read_value(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        self._take(text[at:end])
        if self._value.status == "broken":
            self.status = "broken"
        elif self._value.status == "done":
            self._end_value()
        return end

    def _take(self, text: str) -> None:
        if self._place == "in value" and self._key in self._argument_keys and not self._has_arguments:
            if self._name and self._value.first == "{":
                if not self._sink.has_begun:
                    self._sink.begin(self._name)
                self._sink.arguments(text)
                return
        elif self._place == "in value" and self._key != "name":
            return
        self._held.append(text)

    def _end_value(self) -> None:
        text = "".join(self._held)
        self._held.clear()
        if self._place == "in key":
            key = decoded(text)
            self._key = key if isinstance(key, str) else ""
            self._place = "colon"
            if self._is_bare and self._key not in ("name", "type", "id", *self._argument_keys):
                self.status = "broken"
            return
        self._place = "next"
        if self._key == "name" and not self._name:
            name = decoded(text)
            if not isinstance(name, str) or not name:
                self.status = "broken"
                return
            name = self._name = without_surrogates(name)
            if self._arguments is not None:
                self._sink.begin(name)
                self._sink.arguments(self._arguments)
        elif self._key in self._argument_keys and not self._has_arguments:
            self._has_arguments = True
            if self._sink.has_begun and not text:
                return
            self._arguments = plain_arguments(text)
            if self._name:
                self._sink.begin(self._name)
                self._sink.arguments(self._arguments)

    def _end_object(self) -> int:
        """The closing brace. Returns how many characters of it belong to the call."""
        if not self._sink.has_begun:
            if not self._name or self._is_bare:
                self.status = "broken"
                return 0
            self._sink.begin(self._name)
            self._sink.arguments("{}")
        self.status = "done"
        return 1


def plain_arguments(text: str) -> str:
    """Arguments that are no object: what a string holds, nothing for null, anything else as it is."""
    value = decoded(text)
    if isinstance(value, str):
        return without_surrogates(value) or "{}"
    return "{}" if text == "null" else text


def decoded(text: str) -> object:
    """A JSON value; None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def skip_blanks(text: str, at: int) -> int:
    """The index of the first character from `at` on that is no blank."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
