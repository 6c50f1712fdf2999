"""A call in Gemma's notation, `call:name{key:<|"|>text<|"|>,other:[1,true]}`, whose arguments become JSON."""

import re
from typing import Literal

from headrace.parsers.base import CallSink
from headrace.parsers.parameters import is_json, to_json

_START = "call:"
_NAME = re.compile(r"[^\s{}<]+")
_WORD = re.compile(r'[^{}\[\],:<"]+')
_IN_JSON_STRING = re.compile(r'[^"\\]+')

Place = Literal["start", "name", "object", "string", "json string"]


class GemmaCall:
    """Reads one call. delimiter: begins and ends strings, which stream. Words without delimiters are JSON where they can be, and strings otherwise.

    Strings between double quotes are taken as JSON's. The call begins with the opening brace.
    """

    def __init__(self, sink: CallSink, delimiter: str) -> None:
        self.status = "more"
        self._sink = sink
        self._delimiter = delimiter
        self._place: Place = "start"
        self._num_read = 0
        self._name: list[str] = []
        self._word: list[str] = []
        self._brackets: list[str] = []
        self._is_key = False
        self._partial = ""
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """See `Reader`."""
        while self.status == "more" and at < len(text):
            match self._place:
                case "start":
                    at = self._start(text, at)
                case "name":
                    at = self._read_name(text, at)
                case "object":
                    at = self._between(text, at)
                case "string":
                    at = self._string(text, at)
                case "json string":
                    at = self._json_string(text, at)
        return at

    def mark(self, text: str) -> bool:
        """See `Reader`."""
        if self._place != "string":
            return False
        self._release()
        self._sink.arguments(to_json(text)[1:-1])
        return True

    def finish(self) -> None:
        """See `Reader`."""
        if self._sink.has_begun:
            self._release()
            self._sink.arguments("".join(self._word))

    def _start(self, text: str, at: int) -> int:
        if not self._num_read and text[at] in " \t\r\n":
            return at + 1
        if text[at] != _START[self._num_read]:
            self.status = "broken"
            return at
        self._num_read += 1
        if self._num_read == len(_START):
            self._place = "name"
        return at + 1

    def _read_name(self, text: str, at: int) -> int:
        found = _NAME.match(text, at)
        if found is not None:
            self._name.append(found[0])
            return found.end()
        if text[at] != "{" or not self._name:
            self.status = "broken"
            return at
        self._sink.begin("".join(self._name))
        self._place = "object"
        return self._open(text, at)

    def _open(self, text: str, at: int) -> int:
        self._brackets.append(text[at])
        self._is_key = text[at] == "{"
        self._sink.arguments(text[at])
        return at + 1

    def _between(self, text: str, at: int) -> int:
        """Outside strings."""
        if self._partial or text[at] == self._delimiter[0]:
            return self._delimited(text, at)
        found = _WORD.match(text, at)
        if found is not None:
            self._word.append(found[0])
            return found.end()
        character = text[at]
        if character in "{[":
            self._end_word()
            return self._open(text, at)
        if character == '"':
            self._end_word()
            self._place = "json string"
            self._sink.arguments(character)
            return at + 1
        if character == "<":
            self.status = "broken"
            return at
        if character == ":" and not self._is_key:
            self._word.append(character)
            return at + 1
        self._end_word()
        self._sink.arguments(character)
        if character in "}]":
            self._brackets.pop()
            if not self._brackets:
                self.status = "done"
        self._is_key = character == "," and self._brackets[-1:] == ["{"]
        return at + 1

    def _end_word(self) -> None:
        """A word without delimiters: a key, or a value."""
        word = "".join(self._word).strip()
        self._word.clear()
        if not word:
            return
        self._sink.arguments(to_json(word) if self._is_key or not is_json(word) else word)

    def _delimited(self, text: str, at: int) -> int:
        """The next character of an opening delimiter, or of what only begins like one."""
        grown = self._partial + text[at]
        if grown == self._delimiter:
            self._partial = ""
            self._end_word()
            self._place = "string"
            self._sink.arguments('"')
        elif self._delimiter.startswith(grown):
            self._partial = grown
        else:
            self.status = "broken"
            return at
        return at + 1

    def _string(self, text: str, at: int) -> int:
        first = self._delimiter[0]
        if not self._partial:
            end = text.find(first, at)
            if end != at:
                end = len(text) if end < 0 else end
                self._sink.arguments(to_json(text[at:end])[1:-1])
                return end
        grown = self._partial + text[at]
        if grown == self._delimiter:
            self._partial = ""
            self._place = "object"
            self._sink.arguments('"')
        elif self._delimiter.startswith(grown):
            self._partial = grown
        else:
            # No character of a delimiter but the first begins one.
            self._release()
            return at
        return at + 1

    def _release(self) -> None:
        """What only began like a delimiter is text."""
        text, self._partial = self._partial, ""
        self._sink.arguments(to_json(text)[1:-1] if self._place == "string" else "")

    def _json_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._sink.arguments(text[at])
            return at + 1
        found = _IN_JSON_STRING.match(text, at)
        if found is not None:
            self._sink.arguments(found[0])
            return found.end()
        self._sink.arguments(text[at])
        if text[at] == "\\":
            self._escaped = True
        else:
            self._place = "object"
        return at + 1
