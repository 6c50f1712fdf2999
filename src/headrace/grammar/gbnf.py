"""GBNF, llama.cpp's form of grammars (`root ::= ...`), as lark.

GBNF is matched character by character, the library first cuts its input into lexemes, each as long as possible. So whatever is regular becomes one
terminal: whole rules that do not lead back to themselves, and neighbouring parts of the others. A rule that only goes on with itself at its end
(`ws ::= ([ \\t] ws)?`) is a repetition. What remains of difference is where text before and after a recursive rule could be cut in two ways.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from headrace.grammar.lark import quoted

MAX_DEPTH = 50
"""Levels of brackets in a rule."""


class GbnfError(ValueError):
    """What is wrong with the text, and in which line."""


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class Characters:
    """One character in, or not in, some ranges of code points, both ends included."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Reference:
    name: str


@dataclass(frozen=True, slots=True)
class Sequenced:
    """One after the other; none is the empty text."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeated:
    """At least and at most so many times; no `most` is no limit."""

    item: "Node"
    least: int
    most: int | None


Node = Literal | Characters | Reference | Sequenced | Choice | Repeated

EMPTY = Sequenced(())


def gbnf_to_lark(text: str) -> str:
    """The same language as lark. Raises GbnfError for what is no GBNF, for rules that do not exist, and without a rule `root`."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GbnfError("there is no rule `root`")
    reached = _reached(rules)
    rules = {name: _without_tail(name, rules[name]) for name in reached}
    return _Writer(rules, _regular(rules)).lark()


# --- reading

_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TIMES = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in "\\\"[]-^/'"}
_OPERATORS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, Node]:
        """Every rule by its name; the last one of a name counts."""
        found: dict[str, Node] = {}
        self._match(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME) or self._fail("expected the name of a rule")
            self._match(_SPACE)
            if not self._takes("::="):
                self._fail(f"expected `::=` after {name[0]!r}")
            self._match(_SPACE_AND_LINES)
            found[name[0]] = self._choice(0)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                self._fail("expected the end of the rule")
            self._match(_SPACE_AND_LINES)
        return found

    def _choice(self, depth: int) -> Node:
        options = [self._sequence(depth)]
        while True:
            at = self._at
            self._match(_SPACE_AND_LINES)
            if not self._takes("|"):
                self._at = at if depth == 0 else self._at
                return options[0] if len(options) == 1 else Choice(tuple(options))
            self._match(_SPACE_AND_LINES)
            options.append(self._sequence(depth))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        space = _SPACE if depth == 0 else _SPACE_AND_LINES
        while (item := self._item(depth)) is not None:
            self._match(space)
            items.append(self._repeated(item))
            self._match(space)
        return items[0] if len(items) == 1 else Sequenced(tuple(items))

    def _item(self, depth: int) -> Node | None:
        if self._takes('"'):
            return self._literal()
        if self._takes("["):
            return self._characters()
        if self._takes("("):
            return self._group(depth)
        if self._takes("."):
            return Characters((), negated=True)
        name = self._match(_NAME)
        return Reference(name[0]) if name else None

    def _group(self, depth: int) -> Node:
        if depth == MAX_DEPTH:
            self._at -= 1
            self._fail(f"brackets are nested more than {MAX_DEPTH} deep")
        self._match(_SPACE_AND_LINES)
        item = self._choice(depth + 1)
        if not self._takes(")"):
            self._fail("expected `)`")
        return item

    def _repeated(self, item: Node) -> Node:
        for operator, times in _OPERATORS.items():
            if self._takes(operator):
                return Repeated(item, *times)
        if not self._text.startswith("{", self._at):
            return item
        found = self._match(_TIMES) or self._fail("expected `{m}`, `{m,}` or `{m,n}`")
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if most is not None and most < least:
            self._fail(f"at least {least} and at most {most} times")
        return Repeated(item, least, most)

    def _literal(self) -> Node:
        chars = []
        while not self._takes('"'):
            chars.append(self._char("the string does not end"))
        return Literal("".join(chars))

    def _characters(self) -> Node:
        negated = self._takes("^")
        ranges = []
        while not self._takes("]"):
            first = last = ord(self._char("the character class does not end"))
            if not self._text.startswith("-]", self._at) and self._takes("-"):
                last = ord(self._char("the character class does not end"))
            if last < first:
                self._fail(f"the range {chr(first)!r} to {chr(last)!r} is empty")
            ranges.append((first, last))
        if not ranges and not negated:
            self._fail("the character class is empty")
        return Characters(tuple(ranges), negated)

    def _char(self, missing: str) -> str:
        if self._at == len(self._text):
            self._fail(missing)
        if self._text[self._at] != "\\":
            self._at += 1
            return self._text[self._at - 1]
        escape = self._match(_ESCAPE) or self._fail("a backslash at the end")
        digits = escape[1] or escape[2] or escape[3]
        if digits is None:
            return _ESCAPED.get(escape[4]) or self._fail(f"unknown escape {escape[0]!r}")
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self._fail(f"{escape[0]} is no character")
        return chr(code)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found:
            self._at = found.end()
        return found

    def _takes(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _fail(self, reason: str) -> NoReturn:
        near = self._text[self._at : self._at + 20]
        raise GbnfError(f"{reason}, in line {self._text.count(chr(10), 0, self._at) + 1} at {near!r}")


# --- what is regular


def _references(node: Node) -> Iterator[str]:
    waiting = [node]
    while waiting:
        match waiting.pop():
            case Reference(name):
                yield name
            case Sequenced(items) | Choice(items):
                waiting += items
            case Repeated(item):
                waiting.append(item)


def _reached(rules: dict[str, Node]) -> list[str]:
    """The rules that `root` needs, itself first."""
    found = {"root": None}
    waiting = ["root"]
    while waiting:
        for name in _references(rules[waiting.pop()]):
            if name not in rules:
                raise GbnfError(f"there is no rule {name!r}")
            if name not in found:
                found[name] = None
                waiting.append(name)
    return list(found)


def _without_tail(name: str, node: Node) -> Node:
    """`x ::= a x | b` as `a* b`, where `x` occurs nowhere else."""
    goes_on: list[Node] = []
    ends: list[Node] = []
    for option in _options(node):
        items = option.items if isinstance(option, Sequenced) else (option,)
        *before, last = items or (EMPTY,)
        tail = last == Reference(name)
        if name in (inner for item in (before if tail else items) for inner in _references(item)):
            return node
        if tail:
            goes_on.append(Sequenced(tuple(before)))
        else:
            ends.append(option)
    if not goes_on or not ends:
        return node
    return Sequenced((Repeated(Choice(tuple(goes_on)), 0, None), Choice(tuple(ends))))


def _options(node: Node) -> Iterator[Node]:
    if isinstance(node, Choice):
        for item in node.items:
            yield from _options(item)
    elif isinstance(node, Repeated) and (node.least, node.most) == (0, 1):
        yield from _options(node.item)
        yield EMPTY
    else:
        yield node


def _regular(rules: dict[str, Node]) -> set[str]:
    """The rules that lead only to rules that do not lead back to themselves."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    open_references = {}
    for name, node in rules.items():
        used = set(_references(node))
        open_references[name] = len(used)
        for other in used:
            users[other].add(name)
    found = [name for name, count in open_references.items() if not count]
    for name in found:  # grows
        for user in users[name]:
            open_references[user] -= 1
            if not open_references[user]:
                found.append(user)
    return set(found)


# --- writing


class _Writer:
    """Names of its own: those of GBNF may differ only in what lark's names do not show."""

    def __init__(self, rules: dict[str, Node], regular: set[str]) -> None:
        self._rules = rules
        self._regular = regular
        self._names = {name: f"{'TEXT' if name in regular else 'rule'}_{i}" for i, name in enumerate(rules)}
        self._pieces: dict[str, str] = {}

    def lark(self) -> str:
        lines = [f"start: {self._names['root']}"]
        for name, node in self._rules.items():
            written = self._terminal(node) if name in self._regular else self._rule(node)
            lines.append(f"{self._names[name]}: {written}")
        lines += [f"{name}: {body}" for body, name in self._pieces.items()]
        return "\n".join(lines) + "\n"

    def _is_terminal(self, node: Node) -> bool:
        return all(name in self._regular for name in _references(node))

    def _terminal(self, node: Node) -> str:
        match node:
            case Literal(text):
                return quoted(text)
            case Characters():
                return _class(node)
            case Reference(name):
                return self._names[name]
            case Sequenced(items):
                return f"({' '.join(map(self._terminal, items))})" if items else '""'
            case Choice(items):
                return f"({' | '.join(map(self._terminal, items))})"
            case Repeated(item):
                return f"({self._terminal(item)}){_times(node)}"

    def _rule(self, node: Node) -> str:
        if self._is_terminal(node):
            return self._piece(self._terminal(node))
        match node:
            case Sequenced(items):
                return f"({' '.join(self._merged(items, Sequenced))})"
            case Choice(items):
                return f"({' | '.join(self._merged(items, Choice))})"
            case Repeated(item):
                return f"({self._rule(item)}){_times(node)}"
            case Reference(name):
                return self._names[name]
        raise AssertionError(f"{node} is a terminal")

    def _merged(self, items: Sequence[Node], kind: type[Sequenced] | type[Choice]) -> Iterator[str]:
        """The items, with neighbours (of a choice all) that are terminals as one terminal."""
        if kind is Choice:
            items = sorted(items, key=self._is_terminal)
        run: list[Node] = []
        for item in items:
            if self._is_terminal(item):
                run.append(item)
                continue
            if run:
                yield self._piece(self._terminal(kind(tuple(run))))
            run = []
            yield self._rule(item)
        if run:
            yield self._piece(self._terminal(kind(tuple(run))))

    def _piece(self, body: str) -> str:
        """A terminal of its own, the same for the same body."""
        return self._pieces.setdefault(body, f"PIECE_{len(self._pieces)}")


def _times(node: Repeated) -> str:
    match node.least, node.most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _class(node: Characters) -> str:
    if not node.ranges:
        return "/(?s:.)/"
    shown = "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in node.ranges)
    return f"/[{'^' if node.negated else ''}{shown}]/"
