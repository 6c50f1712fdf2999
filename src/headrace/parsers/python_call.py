"""A call in Python's notation, `name(key=value, ...)`, whose values become JSON."""

import ast
import re
import warnings
from math import isfinite
from typing import Literal

from headrace.parsers.base import CallSink
from headrace.parsers.json_text import skip_blanks
from headrace.parsers.parameters import is_json, to_json

_NAME = re.compile(r"[\w.\-]+")
_HELD = re.compile(r"""[^\\"'()\[\]{},<]+""")
_STRING_PART = {'"': re.compile(r'[^\\"]+'), "'": re.compile(r"[^\\']+")}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "\n": "",
}
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}
_WORDS = {"true": True, "false": False, "null": None}

Place = Literal["name", "first", "key", "equals", "value", "string", "held", "next"]


class PythonCall:
    """Reads one call. A string streams; any other value is held until its end. What is no Python literal becomes a string of its text.

    The call begins with its first `key=`, or with `()`; positional arguments are refused, since their names are not known.
    """

    def __init__(self, sink: CallSink) -> None:
        self.status = "more"
        self._sink = sink
        self._place: Place = "name"
        self._name: list[str] = []
        self._key: list[str] = []
        self._is_empty = True
        # A string that streams: its quote, and an escape that is not complete.
        self._quote = ""
        self._num_quotes = 0
        self._escape = ""
        # A value that is held: its text, its brackets, and the quote of a string within it.
        self._held: list[str] = []
        self._depth = 0
        self._inner_quote = ""
        self._inner_escaped = False

    def feed(self, text: str, at: int) -> int:
        """See `Reader`."""
        while self.status == "more" and at < len(text):
            match self._place:
                case "string":
                    at = self._string(text, at)
                case "held":
                    at = self._hold(text, at)
                case "name" | "key":
                    at = self._word(text, at)
                case _:
                    at = skip_blanks(text, at)
                    if at < len(text):
                        at = self._between(text, at)
        return at

    def mark(self, text: str) -> bool:
        """See `Reader`."""
        if self._place == "string" and self._num_quotes == 1:
            self._sink.arguments(to_json(text)[1:-1])
            return True
        if self._place == "held" and self._inner_quote:
            self._held.append(text)
            return True
        return False

    def finish(self) -> None:
        """See `Reader`."""
        if not self._sink.has_begun:
            return
        if self._place == "held":
            self._sink.arguments("".join(self._held))
        elif self._place == "string":
            self._sink.arguments(to_json(self._escape)[1:-1])
        elif self._place in ("key", "equals") and self._key:
            self._sink.arguments(self._key_text()[: None if self._place == "equals" else -1])

    def _word(self, text: str, at: int) -> int:
        """A name or a key, up to what ends it."""
        word = self._name if self._place == "name" else self._key
        if not word:
            at = skip_blanks(text, at)
            if at == len(text):
                return at
            if self._place == "key" and text[at] == ")":
                return self._close(at)
        found = _NAME.match(text, at)
        if found is not None:
            word.append(found[0])
            return found.end()
        if not word or (self._place == "name" and (text[at] != "(" or word[0][0] in "0123456789.-")):
            self.status = "broken"
            return at
        if self._place == "name":
            self._place = "first"
            return at + 1
        self._place = "equals"
        return at

    def _between(self, text: str, at: int) -> int:
        character = text[at]
        match self._place, character:
            case "first", _:
                if character == ")":
                    self._begin()
                    return self._close(at)
                self._place = "key"
                return at
            case "equals", "=":
                if not self._sink.has_begun:
                    self._begin()
                self._sink.arguments(self._key_text() + ": ")
                self._is_empty = False
                self._key.clear()
                self._place = "value"
            case "value", _:
                self._place = "string" if character in _STRING_PART else "held"
                self._quote = character
                self._num_quotes = 0
                return at
            case "next", ",":
                self._place = "key"
            case "next", ")":
                return self._close(at)
            case _:
                self.status = "broken"
                return at
        return at + 1

    def _begin(self) -> None:
        self._sink.begin("".join(self._name))

    def _key_text(self) -> str:
        return ("{" if self._is_empty else ", ") + to_json("".join(self._key))

    def _close(self, at: int) -> int:
        if not self._sink.has_begun:
            self.status = "broken"
            return at
        self._sink.arguments("{}" if self._is_empty else "}")
        self.status = "done"
        return at + 1

    def _string(self, text: str, at: int) -> int:
        """A part of a string between single quotes, as JSON. One between three is held like other values."""
        character = text[at]
        if self._num_quotes == 0:
            self._num_quotes = 1
            return at + 1
        if self._num_quotes == 1:
            # The quote after the first: an empty string, or the second of three.
            self._num_quotes = 2
            if character == self._quote:
                return at + 1
            self._sink.arguments('"')
        elif self._num_quotes == 2:
            if character == self._quote:
                self._place = "held"
                self._held = [self._quote * 3]
                self._inner_quote = self._quote * 3
                return at + 1
            self._sink.arguments('""')
            self._place = "next"
            return at
        self._num_quotes = 3
        return self._string_text(text, at)

    def _string_text(self, text: str, at: int) -> int:
        if self._escape:
            return self._escaped(text, at)
        found = _STRING_PART[self._quote].match(text, at)
        if found is not None:
            self._sink.arguments(to_json(found[0])[1:-1])
            return found.end()
        if text[at] == "\\":
            self._escape = "\\"
        else:
            self._sink.arguments('"')
            self._place = "next"
        return at + 1

    def _escaped(self, text: str, at: int) -> int:
        """The next character of an escape."""
        escape = self._escape = self._escape + text[at]
        kind = escape[1]
        length = _CODE_LENGTHS.get(kind)
        if length is None:
            self._escape = ""
            self._sink.arguments(to_json(_ESCAPES.get(kind, escape))[1:-1])
        elif text[at] not in "0123456789abcdefABCDEF" and len(escape) > 2:
            self._escape = ""
            self._sink.arguments(to_json(escape[:-1])[1:-1])
            return at
        elif len(escape) == length + 2:
            self._escape = ""
            code = int(escape[2:], 16)
            self._sink.arguments(to_json(chr(code) if code < 0x110000 else escape)[1:-1])
        return at + 1

    def _hold(self, text: str, at: int) -> int:
        """A part of a value that is held."""
        if self._inner_quote:
            return self._hold_string(text, at)
        found = _HELD.match(text, at)
        if found is not None:
            self._held.append(found[0])
            return found.end()
        character = text[at]
        if not self._depth and character in ",)":
            self._sink.arguments(literal_json("".join(self._held)))
            self._held.clear()
            self._place = "next"
            return at
        if character in "\"'":
            self._inner_quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
        if self._depth < 0:
            self.status = "broken"
            return at
        self._held.append(character)
        return at + 1

    def _hold_string(self, text: str, at: int) -> int:
        character = text[at]
        self._held.append(character)
        if self._inner_escaped:
            self._inner_escaped = False
        elif character == "\\":
            self._inner_escaped = True
        elif len(self._inner_quote) == 1:
            if character == self._inner_quote:
                self._inner_quote = ""
        elif self._held[-3:] == list(self._inner_quote):
            self._inner_quote = ""
        return at + 1


def literal_json(text: str) -> str:
    """A Python literal as JSON; `true`, `false` and `null` are taken too. What is no literal becomes a string of its text."""
    text = text.strip()
    if is_json(text):
        return text
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            return to_json(_value(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return to_json(text)


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=None | bool() | int() | str()):
            return node.value
        case ast.Constant(value=float() as real) if isfinite(real):
            return real
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.List() | ast.Tuple() | ast.Set():
            return [_value(item) for item in node.elts]
        case ast.Dict():
            return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            number = _value(operand)
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number if isinstance(node.op, ast.USub) else number
            raise ValueError("no number")
        case _:
            raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    value = None if node is None else _value(node)
    if isinstance(value, str):
        return value
    if node is None or not isinstance(value, int | float):
        raise ValueError("no key")
    return to_json(value)
