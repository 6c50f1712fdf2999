"""Tools that take a text instead of arguments (`custom` tools): the model sees a function with one string parameter, `input`, and calls it as any
other; the client gets the string. Pure functions and a reader without side effects; any thread.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from headrace.server.chat.conversation import Message, Tool, function_call, function_tool, refused, text_of

INPUT = "input"
"""Name of the parameter."""


def custom_tool(where: str, name: object, description: object, form: object) -> Tool:
    """A custom tool as a function.

    form: `{"type": "text"}`, None, or a grammar: `{"type": "grammar", "syntax", "definition"}`, where both may be within an object called
    `grammar` (so in chat completions). With a grammar the tool is strict. A regular expression becomes the pattern of the parameter, which binds
    it; a lark definition its description, so that the model sees it, and binds the input where `call_grammar.binds_texts`.
    Raises RequestError that names `where`, its place in the request.
    """
    text: dict[str, object] = {"type": "string"}
    definition = ""
    match _grammar(f"{where}.format", form):
        case "regex", found:
            text["pattern"] = f"^(?:{found})$"
        case "lark", definition:
            text["description"] = f"A text of this lark grammar:\n{definition}"
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    tool = function_tool(where, name, description, parameters, strict=len(text) > 1)
    return replace(tool, is_custom=True, lark=definition)


def _grammar(where: str, form: object) -> tuple[str, str] | None:
    """The syntax and the definition of a grammar; None for plain text."""
    match form:
        case None | {"type": "text"}:
            return None
        case dict() if not form:
            return None
        case {"type": "grammar", "grammar": dict(grammar)} | ({"type": "grammar"} as grammar):
            assert isinstance(grammar, Mapping), "matched"
        case _:
            raise refused(f"{where}.type", 'must be "text" or "grammar"')
    syntax = grammar.get("syntax")
    if syntax not in ("regex", "lark"):
        raise refused(f"{where}.syntax", 'must be "regex" or "lark"')
    definition = text_of(f"{where}.definition", grammar.get("definition"))
    if syntax == "regex" and _closes_what_it_has_not_opened(definition):
        raise refused(f"{where}.definition", ": a parenthesis is closed that is not open")
    return syntax, definition


_PARENTHESIS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()]", re.DOTALL)
"""Escaped characters, classes of characters, and parentheses that group."""


def _closes_what_it_has_not_opened(pattern: str) -> bool:
    """Whether the pattern would end a group around it."""
    depth = 0
    for found in _PARENTHESIS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth < 0:
            return True
    return False


def custom_call(call_id: str, name: str, text: str) -> Message:
    """An element of `tool_calls` for the call of a custom tool in the history."""
    return function_call(call_id, name, {INPUT: text})


_OPENING = '{"input":"'
_SPACE_BEFORE = frozenset({0, 1, 8, 9})
"""Places in `_OPENING` before which JSON may have whitespace."""

_SPECIAL = re.compile(r'["\\]')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_SHORT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_REPLACEMENT = "\ufffd"


class InputReader:
    """Reads the arguments of a custom tool's call, `{"input": "..."}`, piece by piece, and gives the text of the string.

    What comes out, joined, does not depend on where the pieces are cut. Arguments that do not begin in this way are given as they are; what
    follows the string is left out, and so is an escape sequence that the end of the output has cut.
    """

    def __init__(self) -> None:
        self._state: Literal["opening", "string", "after", "raw"] = "opening"
        self._at = 0
        # The opening so far, which is given as it is if it turns out not to be one; then an unfinished escape sequence.
        self._held = ""

    def push(self, text: str) -> str:
        """The next piece of the arguments; returns what it adds to the input."""
        if self._state == "opening":
            text = self._open(text)
        if self._state == "string":
            return self._read(text)
        return text if self._state == "raw" else ""

    def finish(self) -> str:
        """The end of the arguments: returns what was held back."""
        held, self._held = self._held, ""
        if self._state == "opening":
            return held
        return _REPLACEMENT if self._state == "string" and len(held) >= len("\\ud800") else ""

    def _open(self, text: str) -> str:
        for number, char in enumerate(text):
            if char == _OPENING[self._at]:
                self._at += 1
                if self._at == len(_OPENING):
                    self._state, self._held = "string", ""
                    return text[number + 1 :]
            elif not (char in " \t\r\n" and self._at in _SPACE_BEFORE):
                self._state, held, self._held = "raw", self._held, ""
                return held + text
        self._held += text
        return ""

    def _read(self, text: str) -> str:
        text, at, parts = self._held + text, 0, []
        self._held = ""
        while found := _SPECIAL.search(text, at):
            parts.append(text[at : found.start()])
            at = found.start()
            if text[at] == '"':
                self._state = "after"
                break
            meant, end = _unescaped(text, at)
            if end == at:
                self._held = text[at:]
                break
            parts.append(meant)
            at = end
        else:
            parts.append(text[at:])
        return "".join(parts)


def _unescaped(text: str, at: int) -> tuple[str, int]:
    """What the escape sequence at `at` means, and its end; the end is `at` if more text is needed. What is no escape sequence stays as it is."""
    kind = text[at + 1 : at + 2]
    if kind != "u":
        return ("", at) if not kind else (_SHORT.get(kind, "\\" + kind), at + 2)
    if len(text) < at + 6:
        return "", at
    if not _HEX.fullmatch(text, at + 2, at + 6):
        return "\\u", at + 2
    code = int(text[at + 2 : at + 6], 16)
    if not 0xD800 <= code < 0xE000:
        return chr(code), at + 6
    if code >= 0xDC00:
        return _REPLACEMENT, at + 6
    # The first half of a character: the other half must follow.
    following = text[at + 6 : at + 12]
    if len(following) < 6 and "\\u".startswith(following[:2]):
        return "", at
    if following.startswith("\\u") and _HEX.fullmatch(following, 2):
        low = int(following[2:], 16)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)), at + 12
    return _REPLACEMENT, at + 6


def input_of(arguments: str) -> str:
    reader = InputReader()
    return reader.push(arguments) + reader.finish()
