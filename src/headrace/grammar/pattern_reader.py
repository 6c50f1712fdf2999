"""Regular expressions as the library takes them (the syntax of Rust's `regex`), read as trees of `patterns`.

Refused is what is about the text around (anchors within, word boundaries, look-around), and classes of which it is not known here whether
they have the characters that a JSON string escapes.
"""

import re
import unicodedata
from dataclasses import dataclass, replace

from headrace.grammar.patterns import ASCII, Characters, Pattern, character, choice, repeated, sequenced

MAX_DEPTH = 50
"""Levels of brackets."""

_MAX_TIMES = 1 << 16
_MAX_OPERATORS = 4
_TIMES = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_GROUP = re.compile(r"\?(?:P?<[A-Za-z_][A-Za-z0-9_.\[\]]*>|(?P<flags>[a-zA-Z-]*)(?P<end>[:)]))")
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,6})\})"
    r"|\\([\\.+*?()|\[\]{}^$#&\-~/ \"'!%,:;=@_`])"
)
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_CATEGORY = re.compile(r"\\[pP](?:([A-Z])|\{(\^?)([A-Z][a-z]?)\})")
_ASCII_CLASS = re.compile(r"\[:(\^?)([a-z]+):\]")
_OPERATORS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}

_DIGITS = frozenset("0123456789")
_WORD = frozenset(char for char in ASCII if char.isalnum() or char == "_")
_SPACE = frozenset(" \t\n\r\v\f")
_PERL = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_NAMED = {
    "alnum": _WORD - {"_"},
    "alpha": frozenset(char for char in ASCII if char.isalpha()),
    "ascii": ASCII,
    "blank": frozenset(" \t"),
    "cntrl": frozenset(char for char in ASCII if unicodedata.category(char) == "Cc"),
    "digit": _DIGITS,
    "graph": frozenset(char for char in ASCII if "!" <= char <= "~"),
    "lower": frozenset(char for char in ASCII if char.islower()),
    "print": frozenset(char for char in ASCII if " " <= char <= "~"),
    "punct": frozenset(char for char in ASCII if "!" <= char <= "~" and not char.isalnum()),
    "space": _SPACE,
    "upper": frozenset(char for char in ASCII if char.isupper()),
    "word": _WORD,
    "xdigit": frozenset("0123456789abcdefABCDEF"),
}


class PatternError(ValueError):
    """What is not supported, or wrong."""


@dataclass(frozen=True, slots=True)
class _Flags:
    """ignores_case: `i`. dot_is_any: `s`. verbose: `x`."""

    ignores_case: bool = False
    dot_is_any: bool = False
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class _Set:
    """A class of characters: its text, its ASCII members, and whether it may have others."""

    text: str
    ascii: frozenset[str]
    has_others: bool


def read_pattern(text: str, flags: str = "") -> Pattern:
    """The tree of a regular expression. flags: letters as after `/.../`. Raises PatternError."""
    reader = _Reader(text)
    return reader.whole(reader.with_flags(_Flags(), flags))


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self, flags: _Flags) -> Pattern:
        """The whole expression."""
        found = self._choice(flags, 0)
        if self._at < len(self._text):
            raise PatternError("a parenthesis is closed that is not open")
        return found

    def with_flags(self, flags: _Flags, letters: str) -> _Flags:
        on = True
        for letter in letters:
            match letter:
                case "-":
                    on = False
                case "i":
                    flags = replace(flags, ignores_case=on)
                case "s":
                    flags = replace(flags, dot_is_any=on)
                case "x":
                    flags = replace(flags, verbose=on)
                case "m" | "U":
                    pass  # about anchors, and about which of several matches is taken
                case "u" if on:
                    pass
                case _:
                    raise PatternError(f"the flag `{'' if on else '-'}{letter}` is not supported")
        return flags

    # --- expressions

    def _choice(self, flags: _Flags, depth: int) -> Pattern:
        if depth > MAX_DEPTH:
            raise PatternError(f"brackets are nested more than {MAX_DEPTH} deep")
        options: list[Pattern] = []
        items: list[Pattern] = []
        anchor = ""
        while True:
            self._skip(flags)
            char = self._peek()
            if char in ("", ")"):
                options.append(sequenced(*items))
                if anchor and len(options) > 1:
                    raise PatternError(f"the anchor `{anchor}` beside `|` is not supported")
                return choice(*options)
            if depth == 0 and ((char == "^" and self._at == 0) or (char == "$" and self._at == len(self._text) - 1)):
                # At the ends anchors say nothing: the whole text must match.
                anchor = char
                self._at += 1
                continue
            if char == "|":
                self._at += 1
                options.append(sequenced(*items))
                items = []
            elif char == "(" and (found := _GROUP.match(self._text, self._at + 1)) and found["end"] == ")":
                self._at = found.end()
                flags = self.with_flags(flags, found["flags"])
            else:
                items.append(self._repeated(self._atom(flags, depth), flags))

    def _atom(self, flags: _Flags, depth: int) -> Pattern:
        char = self._peek()
        match char:
            case "(":
                return self._group(flags, depth)
            case "[":
                return _pattern(self._class(flags, 0), flags)
            case ".":
                self._at += 1
                any_char = _Set(r"[\s\S]", ASCII, True) if flags.dot_is_any else _Set(r"[^\n]", ASCII - {"\n"}, True)
                return _pattern(any_char, _Flags())
            case "^" | "$":
                raise PatternError(f"the anchor `{char}` is supported only at the end of the whole expression")
            case "*" | "+" | "?" | "{":
                raise PatternError(f"`{char}` repeats nothing")
            case "\\":
                if known := self._known_class():
                    return _pattern(known, flags)
                return character(self._escape(), flags.ignores_case)
            case _:
                self._at += 1
                return character(char, flags.ignores_case)

    def _group(self, flags: _Flags, depth: int) -> Pattern:
        self._at += 1
        if self._peek() == "?":
            found = _GROUP.match(self._text, self._at)
            if found is None:
                shown = self._text[self._at - 1 : self._at + 3]
                raise PatternError(f"look-around and other groups like `{shown}` are not supported")
            self._at = found.end()
            flags = self.with_flags(flags, found["flags"] or "")
        item = self._choice(flags, depth + 1)
        if self._peek() != ")":
            raise PatternError("a parenthesis is not closed")
        self._at += 1
        return item

    def _repeated(self, item: Pattern, flags: _Flags) -> Pattern:
        for _ in range(_MAX_OPERATORS):
            self._skip(flags)
            char = self._peek()
            if char in _OPERATORS and char:
                self._at += 1
                item = repeated(item, *_OPERATORS[char])
            elif char == "{":
                found = _TIMES.match(self._text, self._at)
                if found is None:
                    raise PatternError("`{` must begin {m}, {m,} or {m,n}")
                self._at = found.end()
                least = int(found[1])
                most = least if found[2] is None else int(found[3]) if found[3] else None
                if max(least, most or 0) > _MAX_TIMES or (most is not None and most < least):
                    raise PatternError(f"`{found[0]}` is not supported")
                item = repeated(item, least, most)
            else:
                return item
            # `?` after it says which match is taken, if there are several: the language is the same.
            self._at += self._peek() == "?"
        raise PatternError(f"more than {_MAX_OPERATORS} operators follow each other")

    # --- classes

    def _class(self, flags: _Flags, depth: int) -> _Set:
        """From `[` to its `]`."""
        if depth > MAX_DEPTH:
            raise PatternError(f"classes are nested more than {MAX_DEPTH} deep")
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        found, operator, is_first = _Set("", frozenset(), False), "", True
        part = found
        while True:
            if flags.verbose:
                self._skip(flags)
            char, two = self._peek(), self._text[self._at : self._at + 2]
            if not char:
                raise PatternError("a class of characters is not closed")
            if (char == "]" and not is_first) or two in ("&&", "--", "~~"):
                found = _combined(found, operator, part) if operator else part
                part = _Set("", frozenset(), False)
                if char == "]":
                    self._at += 1
                    break
                operator = two
                self._at += 2
                continue
            item = self._class_item(flags, depth)
            part = _Set(part.text + item.text, part.ascii | item.ascii, part.has_others or item.has_others)
            is_first = False
        members = found.ascii | _cases(found.ascii) if flags.ignores_case else found.ascii
        if negated:
            return _Set(f"[^{found.text}]", ASCII - members, True)
        return _Set(f"[{found.text}]", members, found.has_others or flags.ignores_case)

    def _class_item(self, flags: _Flags, depth: int) -> _Set:
        if found := _ASCII_CLASS.match(self._text, self._at):
            if found[2] not in _NAMED:
                raise PatternError(f"the class `{found[0]}` does not exist")
            self._at = found.end()
            members = _NAMED[found[2]]
            return _Set(found[0], ASCII - members if found[1] else members, bool(found[1]))
        if self._peek() == "[":
            return self._class(flags, depth + 1)
        if self._peek() == "\\" and (known := self._known_class()):
            return known
        first = last = self._class_char()
        if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", "-", ""):
            self._at += 1
            last = self._class_char()
        if last < first:
            raise PatternError(f"the range {first!r} to {last!r} is empty")
        if first == last:
            return _Set(character(first).text, frozenset(first) & ASCII, first not in ASCII)
        text = f"{character(first).text}-{character(last).text}"
        return _Set(text, frozenset(char for char in ASCII if first <= char <= last), last not in ASCII)

    def _class_char(self) -> str:
        char = self._peek()
        if char == "\\":
            return self._escape()
        if not char:
            raise PatternError("a class of characters is not closed")
        self._at += 1
        return char

    def _known_class(self) -> _Set | None:
        r"""A class that has a name, `\d` or `\p{L}`, if there is one."""
        letter = self._text[self._at + 1 : self._at + 2]
        if letter.lower() in _PERL and letter:
            self._at += 2
            members = _PERL[letter.lower()]
            return _Set(f"\\{letter}", members if letter.islower() else ASCII - members, True)
        if letter not in ("p", "P") or not letter:
            return None
        found = _CATEGORY.match(self._text, self._at)
        if found is None:
            shown = self._text[self._at : self._at + 20].partition("}")[0]
            raise PatternError(f"`{shown}`: only general categories such as \\p{{L}} and \\p{{Lu}} are supported")
        self._at = found.end()
        category = found[1] or found[3]
        members = frozenset(char for char in ASCII if unicodedata.category(char).startswith(category))
        negated = (letter == "P") != bool(found[2])
        return _Set(found[0], ASCII - members if negated else members, True)

    # --- characters

    def _escape(self) -> str:
        r"""One character that is written with a backslash."""
        letter = self._text[self._at + 1 : self._at + 2]
        if letter in _SHORT and letter:
            self._at += 2
            return _SHORT[letter]
        found = _ESCAPE.match(self._text, self._at)
        if found is None:
            kind = "the anchor" if letter in ("b", "B", "A", "z", "Z", "<", ">") and letter else "the escape sequence"
            raise PatternError(f"{kind} `\\{letter}` is not supported")
        self._at = found.end()
        if found[5]:
            return found[5]
        code = int(found[1] or found[2] or found[3] or found[4], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise PatternError(f"`{found[0]}` is no character")
        return chr(code)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, flags: _Flags) -> None:
        """Blanks and comments, where they say nothing."""
        while flags.verbose and (char := self._peek()):
            if char == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end + 1
            elif char.isspace():
                self._at += 1
            else:
                return


def _pattern(found: _Set, flags: _Flags) -> Pattern:
    return Characters(found.text, found.ascii, found.has_others, flags.ignores_case)


def _combined(left: _Set, operator: str, right: _Set) -> _Set:
    text = f"{left.text}{operator}{right.text}"
    match operator:
        case "&&":
            return _Set(text, left.ascii & right.ascii, left.has_others and right.has_others)
        case "--":
            return _Set(text, left.ascii - right.ascii, left.has_others)
        case _:
            return _Set(text, left.ascii ^ right.ascii, left.has_others or right.has_others)


def _cases(members: frozenset[str]) -> frozenset[str]:
    return frozenset(case for char in members for case in (char.lower(), char.upper()))
