"""A user's lark definition, read as rules: for definitions whose texts stand within another text (`lark_nested`).

The dialect is the library's (docs/syntax.md of llguidance). Refused, with the line, is what such a text cannot have or what cannot be written
for it: special tokens, `%json`, `%regex`, other grammars (`%lark`, `@name`), rules with parameters, `%override`, `%declare`, priorities, and
all attributes of rules but `capture`. Pure text work without the library; any thread.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import msgspec

from headrace.grammar.pattern_reader import PatternError, read_pattern
from headrace.grammar.patterns import (
    ASCII,
    MAX_CHARS,
    Characters,
    Not,
    Pattern,
    all_of,
    character,
    choice,
    literal,
    num_chars,
    repeated,
    sequenced,
)

T = TypeVar("T")

MAX_DEFINITION_CHARS = 1 << 15
"""Longest definition. One of this size is read in up to some 0.2 s."""

MAX_DEPTH = 30
"""Levels of brackets, and of terminals that consist of terminals."""

_MAX_COPIED = MAX_CHARS // 4
"""Longest terminal, and most that all terminals together take from others, in characters."""

COMMON = {
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "_EXP": r"[eE][+-]?[0-9]+",
    "FLOAT": r"([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    "SIGNED_FLOAT": r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "NUMBER": r"[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?([0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[A-Za-z]",
    "WORD": r"[A-Za-z]+",
    "CNAME": r"[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*[^*]*\*+([^/*][^*]*\*+)*/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""The terminals that the library has for `%import common.NAME`."""


class LarkError(ValueError):
    """What is wrong with a definition, and in which line."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """A text that a terminal matches."""

    pattern: Pattern


@dataclass(frozen=True, slots=True)
class Reference:
    """A rule by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class InOrder:
    """One after the other."""

    items: "tuple[Rule, ...]"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of them."""

    items: "tuple[Rule, ...]"


@dataclass(frozen=True, slots=True)
class Times:
    """At least and at most so many times; no `most` is no limit."""

    item: "Rule"
    least: int
    most: int | None


Rule = Terminal | Reference | InOrder | OneOf | Times


@dataclass(frozen=True, slots=True)
class Definition:
    """rules: by name, `start` is one of them. ignored: what may stand between two terminals."""

    rules: Mapping[str, Rule]
    ignored: tuple[Pattern, ...]


def read_definition(text: str) -> Definition:
    """Read a definition. Raises LarkError."""
    if len(text) > MAX_DEFINITION_CHARS:
        raise LarkError(f"it has {len(text)} characters, at most {MAX_DEFINITION_CHARS}")
    return _Reader(list(_tokens(text))).definition()


# --- tokens

_TOKEN = re.compile(
    r"""(?P<skip>(?:[ \t]|(?:\#|//)[^\n]*)+)
    |(?P<newline>(?:\r?\n)(?:[ \t\r\n]|(?:\#|//)[^\n]*)*)
    |(?P<string>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1F\x7F])*"i?)
    |(?P<regexp>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<directive>%[a-z]+)
    |(?P<rule>(?:(?<![^\n])[!?]{1,2})?_?[a-z][_a-z0-9-]*)
    |(?P<terminal>_?[A-Z][_A-Z0-9-]*)
    |(?P<number>[+-]?[0-9]+)
    |(?P<special><[^<>\s]+>)
    |(?P<grammar>@[a-zA-Z0-9_-]+)
    |(?P<mark>->|\.\.|::|[:,.(){}\[\]~|&=+*?])""",
    re.VERBOSE | re.DOTALL,
)
_OPERATORS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int
    value: object = None


def _tokens(text: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            hint = "; strings stand between double quotes" if text[at] == "'" else ""
            raise LarkError(f"line {line}: {text[at : at + 20].splitlines()[0]!r} is not lark{hint}")
        kind, value = str(found.lastgroup), None
        if found[0] == "%llguidance":
            value, at = _options(text, found.end(), line)
        else:
            at = found.end()
        if kind != "skip":
            yield _Token(kind, found[0], line, value)
        line += text.count("\n", found.start(), at)
    yield _Token("newline", "", line)
    yield _Token("end", "", line)


def _options(text: str, at: int, line: int) -> tuple[object, int]:
    """The object after `%llguidance`, which must be on one level, and its end."""
    end = text.find("}", at) + 1
    try:
        return msgspec.json.decode(text[at:end]), end
    except msgspec.DecodeError:
        raise LarkError(f"line {line}: `%llguidance` must be followed by an object") from None


# --- rules


class _Reader:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._bodies: dict[str, tuple[_Token, int]] = {}
        self._terminals: dict[str, Pattern] = {}
        # How deep a terminal is nested, and where the reader is: trees are walked by functions that call themselves.
        self._levels: dict[str, int] = {}
        # How long each terminal is, and all that were copied into others.
        self._sizes: dict[str, int] = {}
        self._num_copied = 0
        self._in_progress: list[str] = []
        self._level = self._deepest = 0

    def definition(self) -> Definition:
        """All items. Where a body begins is kept first, so that names may be used before they are defined."""
        ignored: list[int] = []
        while self._next.kind != "end":
            token = self._take()
            if token.kind == "newline":
                continue
            if token.kind in ("rule", "terminal"):
                self._name(token)
            elif token.text == "%ignore":
                ignored.append(self._at)
            elif token.text == "%import":
                self._import()
                self._check_end()
            elif token.text == "%llguidance":
                self._check_options(token)
                self._check_end()
            elif token.kind == "directive":
                self._fail(f"`{token.text}` is not supported", token)
            else:
                self._fail("expected a rule, a terminal or a directive", token)
            self._skip_body()
        rules = {
            name: self._body(start, self._rule_choice)
            for name, (token, start) in self._bodies.items()
            if token.kind == "rule"
        }
        for name, (token, _) in self._bodies.items():
            if token.kind == "terminal":
                self._terminal(name, token)
        if "start" not in rules:
            raise LarkError("there is no rule `start`")
        return Definition(rules, tuple(self._body(start, self._pattern_choice) for start in ignored))

    def _name(self, token: _Token) -> None:
        """The name of a rule or terminal, what stands between it and the colon, and where its body begins."""
        name = token.text.lstrip("!?")
        if name in self._bodies or name in self._terminals:
            self._fail(f"`{name}` is defined twice", token)
        match self._next.text:
            case "{" | "::":
                self._fail(f"`{name}` has parameters, which are not supported")
            case ".":
                self._fail("priorities are not supported")
            case "[":
                self._attributes()
        self._expect(":")
        self._bodies[name] = (token, self._at)

    def _attributes(self) -> None:
        self._expect("[")
        while self._next.text != "]":
            token = self._take()
            if token.text != "capture":
                self._fail(f"the attribute `{token.text}` is not supported", token)
            if self._accept("="):
                self._take()
            if not self._accept(","):
                break
        self._expect("]")

    def _import(self) -> None:
        """`%import common.NAME`, `%import common.NAME -> OTHER` or `%import common (NAME, NAME)`."""
        self._expect("common")
        if self._accept("("):
            self._add_common(self._take(), None)
            while self._accept(","):
                self._add_common(self._take(), None)
            self._expect(")")
            return
        self._expect(".")
        token = self._take()
        self._add_common(token, self._take().text if self._accept("->") else None)

    def _add_common(self, token: _Token, alias: str | None) -> None:
        name = alias or token.text
        if token.text not in COMMON:
            self._fail(f"`common.{token.text}` does not exist; there are {', '.join(COMMON)}", token)
        if name in self._bodies or name in self._terminals:
            self._fail(f"`{name}` is defined twice", token)
        self._terminals[name] = read_pattern(COMMON[token.text])

    def _check_options(self, token: _Token) -> None:
        """Only what does not change the texts."""
        others = [str(name) for name in token.value if name != "no_forcing"] if isinstance(token.value, dict) else ["?"]
        if others:
            self._fail(f"the option {others[0]!r} of `%llguidance` is not supported", token)

    def _skip_body(self) -> None:
        """To the next item: a line that does not begin with `|`."""
        while self._next.kind != "end":
            token = self._take()
            if token.kind == "newline" and self._next.text != "|":
                return

    def _body(self, start: int, read: Callable[[], T]) -> T:
        at, self._at = self._at, start
        made = read()
        self._check_end()
        self._at = at
        return made

    def _check_end(self) -> None:
        if self._next.kind != "newline":
            self._fail(f"`{self._next.text}` is not expected here")

    # --- bodies of rules

    def _rule_choice(self) -> Rule:
        options = [self._rule_sequence()]
        while self._accept_or():
            options.append(self._rule_sequence())
        return options[0] if len(options) == 1 else OneOf(tuple(options))

    def _rule_sequence(self) -> Rule:
        items: list[Rule] = []
        while not self._ends_sequence():
            items.append(self._rule_item())
        if self._next.text == "&":
            self._fail("`&` is supported only in terminals, whose names are in upper case")
        self._alias()
        return items[0] if len(items) == 1 else InOrder(tuple(items))

    def _rule_item(self) -> Rule:
        token = self._next
        item: Rule
        if token.text in ("(", "["):
            item = self._bracketed(self._rule_choice)
            if token.text == "[":
                item = Times(item, 0, 1)
        elif token.kind == "rule":
            self._take()
            name = token.text.lstrip("!?")
            if name not in self._bodies:
                self._fail(f"the rule `{name}` is not defined", token)
            self._check_use()
            item = Reference(name)
        else:
            item = Terminal(self._pattern_atom())
        times = self._times()
        return Times(item, *times) if times != (1, 1) else item

    # --- bodies of terminals

    def _pattern_choice(self) -> Pattern:
        options = [self._pattern_all()]
        while self._accept_or():
            options.append(self._pattern_all())
        return choice(*options)

    def _pattern_all(self) -> Pattern:
        parts = [self._pattern_sequence()]
        while self._accept("&"):
            parts.append(self._pattern_sequence())
        self._alias()
        return all_of(*parts)

    def _pattern_sequence(self) -> Pattern:
        items: list[Pattern] = []
        while not self._ends_sequence():
            token = self._next
            item = self._pattern_atom()
            if token.kind == "terminal":
                self._note_copy(token)
            items.append(repeated(item, *self._times()))
        return sequenced(*items)

    def _pattern_atom(self) -> Pattern:
        token = self._next
        if token.text in ("(", "["):
            item = self._bracketed(self._pattern_choice)
            return item if token.text == "(" else repeated(item, 0, 1)
        self._take()
        match token.kind:
            case "mark" if token.text == "~":
                return Not(self._one_deeper(self._pattern_atom))
            case "string":
                return self._string(token)
            case "regexp":
                body, _, flags = token.text[1:].rpartition("/")
                try:
                    return read_pattern(body, flags)
                except PatternError as err:
                    self._fail(f"the regular expression {token.text[:80]}: {err}", token)
            case "terminal":
                self._check_use()
                return self._terminal(token.text, token)
            case "rule":
                self._fail(f"a terminal cannot have the rule `{token.text}` in it", token)
            case "special":
                self._fail(f"special tokens ({token.text}) are not supported: they are no text", token)
            case "grammar" | "directive":
                self._fail(f"`{token.text}` is not supported", token)
        self._fail(f"`{token.text}` is not expected here" if token.text.strip() else "a value is missing", token)

    def _terminal(self, name: str, used: _Token) -> Pattern:
        if name not in self._terminals:
            if name not in self._bodies:
                self._fail(f"the terminal `{name}` is not defined", used)
            if name in self._in_progress:
                self._fail(f"the terminal `{name}` leads back to itself", used)
            self._in_progress.append(name)
            if len(self._in_progress) > MAX_DEPTH:
                self._fail(f"terminals are nested more than {MAX_DEPTH} levels deep", used)
            level, deepest, self._level, self._deepest = self._level, self._deepest, 0, 0
            self._terminals[name] = self._body(self._bodies[name][1], self._pattern_choice)
            self._levels[name] = self._deepest + 1
            self._sizes[name] = num_chars(self._terminals[name])
            if self._sizes[name] > _MAX_COPIED:
                self._fail(f"the terminal `{name}` is too large", used)
            self._level, self._deepest = level, deepest
            self._in_progress.pop()
        self._reach(self._level + self._levels.get(name, 1))
        return self._terminals[name]

    def _note_copy(self, token: _Token) -> None:
        """A terminal's text is copied into another terminal. A short definition could ask for any number of copies, so it is refused before."""
        self._num_copied += self._sizes.get(token.text, 0)
        if self._num_copied > _MAX_COPIED:
            self._fail("terminals within terminals: the definition is too large", token)

    def _string(self, token: _Token) -> Pattern:
        ignores_case = token.text.endswith("i")
        text = self._string_value(token)
        if not self._accept(".."):
            return literal(text, ignores_case)
        end = self._take()
        last = self._string_value(end) if end.kind == "string" else ""
        if len(text) != 1 or len(last) != 1 or last < text:
            self._fail("a range needs two characters, the smaller one first", token)
        return Characters(
            f"[{character(text).text}-{character(last).text}]",
            frozenset(char for char in ASCII if text <= char <= last),
            last not in ASCII,
        )

    def _string_value(self, token: _Token) -> str:
        shown = re.sub(r"\\(?:x(..)|(.))", lambda m: f"\\u00{m[1]}" if m[1] else m[0], token.text.removesuffix("i"))
        try:
            return msgspec.json.decode(shown, type=str)
        except msgspec.DecodeError as err:
            self._fail(f"the string {token.text[:80]}: {err}", token)

    # --- pieces of both

    def _bracketed(self, read: Callable[[], T]) -> T:
        closing = ")" if self._take().text == "(" else "]"
        made = self._one_deeper(read)
        self._expect(closing)
        return made

    def _one_deeper(self, read: Callable[[], T]) -> T:
        self._level += 1
        self._reach(self._level)
        made = read()
        self._level -= 1
        return made

    def _reach(self, level: int) -> None:
        self._deepest = max(self._deepest, level)
        if level > MAX_DEPTH:
            self._fail(f"brackets and terminals are nested more than {MAX_DEPTH} levels deep")

    def _times(self) -> tuple[int, int | None]:
        token = self._next
        if token.text in _OPERATORS:
            self._take()
            return _OPERATORS[token.text]
        if token.text == "~" and self._tokens[self._at + 1].kind == "number":
            self._take()
            least = self._number()
            return self._checked_times(least, self._number() if self._accept("..") else least, token)
        if not self._accept("{"):
            return 1, 1
        least = 0 if self._next.text == "," else self._number()
        most: int | None = least
        if self._accept(","):
            most = None if self._next.text == "}" else self._number()
        self._expect("}")
        return self._checked_times(least, most, token)

    def _checked_times(self, least: int, most: int | None, token: _Token) -> tuple[int, int | None]:
        if (
            least < 0
            or least > MAX_DEFINITION_CHARS
            or (most is not None and not least <= most <= MAX_DEFINITION_CHARS)
        ):
            self._fail(f"at least {least} and at most {most} times", token)
        return least, most

    def _number(self) -> int:
        token = self._take()
        if token.kind != "number" or len(token.text) > 9:
            self._fail("expected a number", token)
        return int(token.text)

    def _check_use(self) -> None:
        """No parameters."""
        if self._next.text == "::" or (self._next.text == "{" and self._tokens[self._at + 1].text[:1].isalpha()):
            self._fail("rules with parameters are not supported")

    def _alias(self) -> None:
        if self._accept("->"):
            self._take()
        if self._next.kind == "directive":
            self._fail(f"`{self._next.text}` is not supported here")

    def _ends_sequence(self) -> bool:
        return self._next.kind in ("newline", "end") or self._next.text in ("|", "->", "}", ")", "]", "&", "%if")

    def _accept_or(self) -> bool:
        """`|`, also at the beginning of a line."""
        if self._next.kind == "newline" and self._tokens[self._at + 1].text == "|":
            self._take()
        return self._accept("|")

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._tokens[self._at]
        self._at += token.kind != "end"
        return token

    def _accept(self, text: str) -> bool:
        if self._next.text != text:
            return False
        self._take()
        return True

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            self._fail(f"expected `{text}`, found `{self._next.text.strip() or 'the end of the line'}`")

    def _fail(self, reason: str, token: _Token | None = None) -> NoReturn:
        raise LarkError(f"line {(token or self._next).line}: {reason}")
