"""Readers of a call's text, which make its arguments JSON while it comes: JSON itself, Python's notation, Gemma's."""

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Literal

from headrace.parsers.base import BLANK, CallSink, Malformed, Reader, Result, Steps
from headrace.parsers.parameters import is_json, to_json, without_surrogates

# --- JSON, passed on byte for byte

_IN_STRING = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r'[^"{}\[\]<]*')
_SCALAR = re.compile(rf'[^,}}\]{{\["<{BLANK}]*')


class JsonReader(Reader):
    """Finds the end of a JSON value by its brackets and strings; the value itself is not checked. `<` outside a string begins a mark."""

    def _value(self) -> Steps:
        """A value, which begins without blanks."""
        first = yield from self._peek()
        if first in ",:}]<":
            raise Malformed
        depth = 0
        while True:
            while self._at == len(self._text):
                yield
            if first not in '{["':
                self._skip(_SCALAR)
                if self._at < len(self._text):
                    return
                continue
            found = _OUTSIDE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at == len(self._text):
                continue
            character = self._text[self._at]
            if character == "<":
                raise Malformed
            self._at += 1
            if character == '"':
                yield from self._string()
            else:
                depth += 1 if character in "{[" else -1
            if not depth:
                return

    def _string(self) -> Steps:
        """The rest of a string, and its closing quote."""
        self._in_string = True
        while True:
            found = _IN_STRING.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at == len(self._text):
                yield
                continue
            self._at += 1
            if self._text[self._at - 1] == '"':
                break
            yield from self._peek()
            self._at += 1
        self._in_string = False


class JsonArguments(JsonReader):
    """Reads the object of a call's arguments, whose name was read before; the call begins with its opening brace."""

    def _read(self) -> Steps:
        if (yield from self._solid()) != "{":
            raise Malformed
        self._sink.begin()
        yield from self._passed(self._value(), self._sink.arguments)

    def mark(self, text: str) -> bool:
        if self._in_string:
            self._sink.arguments(text)
        return self._in_string

    def finish(self) -> None:
        if not self._sink.has_begun:
            self._sink.begin()


class JsonCall(JsonReader):
    """Reads `{"name": ..., "arguments": {...}}`, in either order, and passes the arguments on. What else is in the object is left out.

    argument_keys: names of the key of the arguments. is_bare: nothing but the object itself says that it is a call: it needs name and arguments.
    Arguments within a string, as some models write them, are those that the string holds.
    """

    def __init__(
        self, sink: CallSink, argument_keys: Sequence[str] = ("arguments", "parameters"), is_bare: bool = False
    ) -> None:
        super().__init__(sink)
        self._argument_keys = argument_keys
        self._is_bare = is_bare
        self._name = ""
        self._arguments: str | None = None
        # Where the text of the value goes that is being read.
        self._take = self._held.append
        self._in_arguments = False

    def _read(self) -> Steps:
        yield from self._solid()
        yield from self._expect("{")
        has_arguments = False
        while (character := (yield from self._solid())) != "}":
            if character != '"':
                raise Malformed
            key = decoded((yield from self._taken(self._held.append)))
            if self._is_bare and key not in ("name", "type", "id", *self._argument_keys):
                raise Malformed
            yield from self._solid()
            yield from self._expect(":")
            first = yield from self._solid()
            if key == "name" and not self._name:
                yield from self._read_name()
            elif key in self._argument_keys and not has_arguments:
                has_arguments = True
                yield from self._read_arguments(first)
            else:
                yield from self._taken(lambda text: None)
            if (yield from self._solid()) == ",":
                self._at += 1
            elif self._text[self._at] != "}":
                raise Malformed
        if not self._sink.has_begun:
            if not self._name or self._is_bare:
                raise Malformed
            self._begin("{}")
        self._at += 1

    def _taken(self, take: Callable[[str], None]) -> Result:
        """A value, which is given to `take` as it comes. Returns what was held of it."""
        self._take = take
        yield from self._passed(self._value(), take)
        return self._release()

    def _read_name(self) -> Steps:
        name = decoded((yield from self._taken(self._held.append)))
        if not isinstance(name, str) or not name:
            raise Malformed
        self._name = without_surrogates(name)
        if self._arguments is not None:
            self._begin(self._arguments)

    def _read_arguments(self, first: str) -> Steps:
        self._in_arguments = True
        if self._name and first == "{":
            self._begin("")
            yield from self._taken(self._sink.arguments)
        else:
            self._arguments = plain_arguments((yield from self._taken(self._held.append)))
            if self._name:
                self._begin(self._arguments)
        self._in_arguments = False

    def _begin(self, arguments: str) -> None:
        self._sink.begin(self._name)
        self._sink.arguments(arguments)

    def mark(self, text: str) -> bool:
        if self._in_string:
            self._take(text)
        return self._in_string

    def finish(self) -> None:
        if not self._sink.has_begun and self._name and not self._is_bare:
            self._begin(self._arguments or "")
        if self._sink.has_begun and self._in_arguments:
            self._sink.arguments(self._release())


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


# --- Python's notation

_NAME = re.compile(r"[\w.\-]+")
_HELD = re.compile(r"""[^"'()\[\]{},]+""")
_NO_QUOTE = re.compile(r"""[^\\"']+""")
_STRING_PART = {'"': re.compile(r'[^\\"]+'), "'": re.compile(r"[^\\']+")}
_ESCAPES = dict(zip("ntrabfv\\'\"/", "\n\t\r\a\b\f\v\\'\"/", strict=True)) | {"\n": ""}
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}
_WORDS = {"true": True, "false": False, "null": None}


class PythonCall(Reader):
    """Reads one call, `name(key=value, ...)`. A string streams; any other value is held until its end. What is no Python literal becomes a string of
    its text.

    The call begins with its first `key=`, or with `()`; positional arguments are refused, since their names are not known.
    """

    def __init__(self, sink: CallSink) -> None:
        super().__init__(sink)
        self._place: Literal["key", "equals", "held", ""] = ""
        self._is_empty = True
        self._key = ""
        self._escape = ""

    def _read(self) -> Steps:
        yield from self._solid()
        name = yield from self._word(_NAME)
        if not name or name[0] in "0123456789.-":
            raise Malformed
        yield from self._expect("(")
        while (yield from self._solid()) != ")":
            self._place = "key"
            self._key = yield from self._word(_NAME)
            if not self._key:
                raise Malformed
            self._place = "equals"
            yield from self._solid()
            yield from self._expect("=")
            if not self._sink.has_begun:
                self._sink.begin(name)
            self._sink.arguments(self._key_text(self._key) + ": ")
            self._is_empty = False
            self._place = ""
            quote = yield from self._solid()
            yield from self._string(quote) if quote in _STRING_PART else self._other_value()
            self._place = ""
            if (yield from self._solid()) == ",":
                self._at += 1
            elif self._text[self._at] != ")":
                raise Malformed
        if not self._sink.has_begun:
            self._sink.begin(name)
        self._at += 1
        self._sink.arguments("{}" if self._is_empty else "}")

    def _key_text(self, key: str) -> str:
        return ("{" if self._is_empty else ", ") + to_json(key)

    def _string(self, quote: str) -> Steps:
        """A string between single quotes, as JSON. One between three is held like other values."""
        self._at += 1
        if (yield from self._peek()) == quote:
            self._at += 1
            if (yield from self._peek()) == quote:
                self._at += 1
                yield from self._other_value(quote * 3)
            else:
                self._sink.arguments('""')
            return
        self._sink.arguments('"')
        while True:
            character = yield from self._peek()
            if part := self._skip(_STRING_PART[quote]):
                self._write(part)
                continue
            self._at += 1
            if character == quote:
                self._sink.arguments('"')
                return
            yield from self._escaped()

    def _write(self, text: str) -> None:
        self._sink.arguments(to_json(text)[1:-1])

    def _escaped(self) -> Steps:
        """What follows a backslash."""
        self._escape = "\\"
        kind = yield from self._peek()
        self._at += 1
        self._escape += kind
        length = 2 + _CODE_LENGTHS.get(kind, 0)
        while len(self._escape) < length and (yield from self._peek()) in "0123456789abcdefABCDEF":
            self._escape += self._text[self._at]
            self._at += 1
        escape, self._escape = self._escape, ""
        if length == 2:
            self._write(_ESCAPES.get(kind, escape))
        elif len(escape) < length or (code := int(escape[2:], 16)) >= 0x110000:
            self._write(escape)
        else:
            self._write(chr(code))

    def _other_value(self, quote: str = "") -> Steps:
        """A value that is held to its end. quote: it begins with a string, whose opening quote was read."""
        self._place = "held"
        depth = 0
        while True:
            if quote:
                self._held.append(quote)
                yield from self._held_string(quote)
                quote = ""
            character = yield from self._peek()
            if part := self._skip(_HELD):
                self._held.append(part)
                continue
            if not depth and character in ",)":
                break
            depth += (character in "([{") - (character in ")]}")
            if depth < 0:
                raise Malformed
            self._at += 1
            if character in "\"'":
                quote = character
            else:
                self._held.append(character)
        self._sink.arguments(literal_json(self._release()))

    def _held_string(self, quote: str) -> Steps:
        self._in_string = True
        num_quotes = 0
        while num_quotes < len(quote):
            character = yield from self._peek()
            if part := self._skip(_NO_QUOTE):
                self._held.append(part)
                num_quotes = 0
                continue
            self._at += 1
            self._held.append(character)
            num_quotes = num_quotes + 1 if character == quote[0] else 0
            if character == "\\":
                self._held.append((yield from self._peek()))
                self._at += 1
        self._in_string = False

    def mark(self, text: str) -> bool:
        if self._in_string:
            self._held.append(text)
        return self._in_string

    def finish(self) -> None:
        if not self._sink.has_begun:
            return
        key = self._key if self._place == "equals" else self._release() if self._place == "key" else ""
        if key:
            self._sink.arguments(self._key_text(key)[: None if self._place == "equals" else -1])
        elif self._place == "held":
            self._sink.arguments(self._release())
        self._write(self._escape)


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


# --- Gemma's notation

_FUNCTION = re.compile(r"[^\s{}<]+")
_BARE = re.compile(r'[^{}\[\],:<"]+')


class GemmaCall(JsonReader):
    """Reads one call, `call:name{key:<|"|>text<|"|>,other:[1,true]}`.

    delimiter: begins and ends strings, which stream; it begins with `<`. Words without delimiters are JSON where they can be, and strings
    otherwise. Strings between double quotes are taken as JSON's. The call begins with the opening brace.
    """

    def __init__(self, sink: CallSink, delimiter: str) -> None:
        super().__init__(sink)
        self._delimiter = delimiter
        self._in_text = False
        self._partial = ""

    def _read(self) -> Steps:
        yield from self._solid()
        yield from self._expect("call:")
        name = yield from self._word(_FUNCTION)
        if not name or self._text[self._at] != "{":
            raise Malformed
        self._sink.begin(name)
        brackets: list[str] = []
        is_key = False
        while True:
            while self._at == len(self._text):
                yield
            if part := self._skip(_BARE):
                self._held.append(part)
                continue
            character = self._text[self._at]
            if character == "<":
                yield from self._expect(self._delimiter)
                self._end_word(is_key)
                yield from self._delimited()
                continue
            self._at += 1
            if character == ":" and not is_key:
                self._held.append(character)
                continue
            self._end_word(is_key)
            self._sink.arguments(character)
            if character == '"':
                yield from self._passed(self._string(), self._sink.arguments)
                continue
            if character in "{[":
                brackets.append(character)
            elif character in "}]":
                brackets.pop()
                if not brackets:
                    return
            is_key = character == "{" or (character == "," and brackets[-1] == "{")

    def _end_word(self, is_key: bool) -> None:
        """A word without delimiters: a key, or a value."""
        if word := self._release().strip():
            self._sink.arguments(to_json(word) if is_key or not is_json(word) else word)

    def _delimited(self) -> Steps:
        """A string behind its opening delimiter."""
        self._in_text = True
        self._sink.arguments('"')
        while self._partial != self._delimiter:
            while self._at == len(self._text):
                yield
            character = self._text[self._at]
            if self._delimiter.startswith(self._partial + character):
                self._partial += character
                self._at += 1
                continue
            # No character of a delimiter but the first begins one.
            self._end_partial()
            end = self._text.find("<", self._at)
            start, self._at = self._at, len(self._text) if end < 0 else end
            self._sink.arguments(to_json(self._text[start : self._at])[1:-1])
        self._partial = ""
        self._in_text = False
        self._sink.arguments('"')

    def _end_partial(self) -> None:
        """What only began like a delimiter is text."""
        if self._partial:
            self._sink.arguments(to_json(self._partial)[1:-1])
            self._partial = ""

    def mark(self, text: str) -> bool:
        if self._in_text:
            self._end_partial()
            self._sink.arguments(to_json(text)[1:-1])
        return self._in_text

    def finish(self) -> None:
        if self._sink.has_begun:
            self._end_partial()
            self._sink.arguments(self._release())
