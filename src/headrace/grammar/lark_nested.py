"""A user's lark definition, written so that its texts may stand within another text: in a JSON string, or as they are up to a mark.

In a JSON string the library's lexer is in the way: it takes the longest lexeme and looks one byte ahead. After `/[^\\n]+/` a backslash may begin
another character of that lexeme, so it is read on, and the `n` of a line break comes too late. So a terminal takes the backslash of what follows
along, and the next one begins behind it: the definition becomes its product with an automaton that knows whether a backslash is pending. Then
the lexemes are those that the definition has of the text itself.

Up to a mark, a terminal at the end that could go on into the mark becomes one lexeme with it, and no terminal contains the mark, since whoever
reads the text would take it for the end.

What is ignored stands between two terminals, and nowhere else.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping

from headrace.grammar.lark_reader import Definition, InOrder, LarkError, OneOf, Reference, Rule, Terminal, Times
from headrace.grammar.patterns import (
    ANY_TEXT,
    ASCII,
    MAX_CHARS,
    NOTHING,
    Not,
    Pattern,
    TooLargeError,
    all_of,
    ascii_members,
    character,
    choice,
    follows,
    is_nullable,
    literal,
    sequenced,
    starts,
    written,
)

State = tuple[bool, bool]
"""Whether nothing has come yet (where something is ignored, or else False); whether a backslash is pending, or the mark has come."""

Pair = tuple[State, State]
Pairs = frozenset[Pair]
Matrix = Mapping[Pair, str]
"""What leads from one state to another, as the body of a rule. What is not there leads nowhere."""

Parts = tuple[Pattern, Pattern, Pattern, Pattern]
"""A terminal's texts: from an unmarked state to an unmarked one, to a marked one; from a marked state to an unmarked one, to a marked one."""

_NO_TEXT = '""'
_MAX_INLINE = 200
"""Longest body that is repeated instead of named."""

_NAMES = re.compile(r"[A-Za-z]\w*")


def in_json_string(definition: Definition, prefix: str) -> tuple[str, list[str]]:
    """A definition between the quotes of a JSON string: the expression, and the rules and terminals that it needs.

    prefix: what their names begin with, in lower case. The string has only the escapes of `patterns.ESCAPES`. Raises LarkError for a
    definition that is too large, or matches nothing.
    """
    backslash = character("\\")

    def parts(pattern: Pattern) -> Parts:
        plain, after = starts(pattern)
        return plain, sequenced(plain, backslash), after, sequenced(after, backslash)

    product = _Product(definition, prefix, parts)
    options = [product.start(False, False)]
    if begun := product.start(True, False):
        options.append(f"{product.terminal(backslash)} {begun}")
    return product.result(options)


def up_to_mark(definition: Definition, prefix: str, mark: str, excluded: str) -> tuple[str, list[str]]:
    """A definition and then the mark, as they are; otherwise as `in_json_string`.

    mark: "" is none. excluded: what no terminal contains, "" for nothing.
    """

    def parts(pattern: Pattern) -> Parts:
        if excluded and ascii_members(pattern) >= ASCII.intersection(excluded):
            pattern = all_of(pattern, Not(sequenced(ANY_TEXT, literal(excluded), ANY_TEXT)))
        ended = sequenced(pattern, literal(mark)) if mark[:1] in follows(pattern) else NOTHING
        return pattern, ended, NOTHING, NOTHING

    product = _Product(definition, prefix, parts)
    unmarked = product.start(False, False)
    if mark and unmarked:
        unmarked += f" {product.terminal(literal(mark))}"
    return product.result([unmarked, product.start(False, True)])


class _Product:
    """The rules of a definition between states."""

    def __init__(self, definition: Definition, prefix: str, parts: Callable[[Pattern], Parts]) -> None:
        self._prefix = prefix
        self._parts = parts
        self._definitions: dict[str, str] = {}
        self._num_chars = self._num_stars = 0
        self._names: dict[str, str] = {}
        # By the Python ids of patterns, which the definition keeps.
        self._terminals: dict[int, Matrix] = {}
        self._numbers = {name: number for number, name in enumerate(definition.rules)}
        self._ignores = bool(definition.ignored)
        firsts = (True, False) if self._ignores else (False,)
        self._states = [(is_first, is_marked) for is_first in firsts for is_marked in (False, True)]
        self._same: Matrix = {(state, state): _NO_TEXT for state in self._states}
        try:
            self._between = self._star(self._texts(choice(*definition.ignored))) if self._ignores else self._same
            self._pairs = self._all_pairs(definition.rules)
            for name, rule in definition.rules.items():
                for pair, body in self._matrix(rule).items():
                    self._define(self._rule_name(name, pair), body)
        except TooLargeError:
            raise LarkError("it is too large") from None

    def start(self, from_marked: bool, to_marked: bool) -> str:
        """The whole definition, or "" for nothing."""
        begin = (self._ignores, from_marked)
        options = [
            self._rule_name("start", (begin, end))
            for end in ((False, to_marked), (True, to_marked))
            if (begin, end) in self._pairs["start"]
        ]
        return self._one_of(options) if options else ""

    def terminal(self, pattern: Pattern) -> str:
        """The name of a terminal that matches a pattern."""
        return self._named(written(pattern), f"{self._prefix}t".upper())

    def result(self, options: Iterable[str]) -> tuple[str, list[str]]:
        """An expression for one of some bodies, and the definitions that it needs."""
        kept = [option for option in options if option]
        if not kept:
            raise LarkError("it matches no text")
        expression = self._one_of(kept)
        needed: dict[str, None] = {}
        todo = [expression]
        while todo:
            for name in _NAMES.findall(todo.pop()):
                if name not in needed:
                    needed[name] = None
                    if name[0].islower():
                        todo.append(self._definitions[name])
        return expression, [f"{name}: {self._definitions[name]}" for name in needed]

    # --- which states a rule leads to

    def _all_pairs(self, rules: Mapping[str, Rule]) -> dict[str, Pairs]:
        """The pairs of states of every rule: the least ones that fit each other."""
        users: dict[str, list[str]] = defaultdict(list)
        for name, rule in rules.items():
            for used in set(_references(rule)):
                users[used].append(name)
        known: dict[str, Pairs] = dict.fromkeys(rules, frozenset())
        waiting = dict.fromkeys(rules)
        todo = deque(rules)
        while todo:
            name = todo.popleft()
            waiting.pop(name, None)
            found = self._pairs_of(rules[name], known)
            if found != known[name]:
                known[name] = found
                more = [user for user in users[name] if user not in waiting]
                waiting.update(dict.fromkeys(more))
                todo += more
        return known

    def _pairs_of(self, rule: Rule, known: Mapping[str, Pairs]) -> Pairs:
        match rule:
            case Terminal(pattern):
                return frozenset(self._terminal_matrix(pattern))
            case Reference(name):
                return known[name]
            case OneOf(items):
                return frozenset().union(*(self._pairs_of(item, known) for item in items))
            case InOrder(items):
                pairs = frozenset(self._same)
                for item in items:
                    pairs = _composed(pairs, self._pairs_of(item, known))
                return pairs
            case Times(item, least, most):
                return _repeated(self._pairs_of(item, known), frozenset(self._same), least, most)

    # --- bodies

    def _matrix(self, rule: Rule) -> Matrix:
        match rule:
            case Terminal(pattern):
                return self._terminal_matrix(pattern)
            case Reference(name):
                return {pair: self._rule_name(name, pair) for pair in self._pairs[name]}
            case OneOf(items):
                return self._any(*map(self._matrix, items))
            case InOrder(items):
                found = self._same
                for item in items:
                    found = self._then(found, self._matrix(item))
                return found
            case Times(item, least, most):
                return self._times(self._matrix(item), least, most)

    def _terminal_matrix(self, pattern: Pattern) -> Matrix:
        if id(pattern) not in self._terminals:
            texts = self._texts(pattern)
            found = texts
            if self._ignores:
                firsts: Matrix = {((True, begin[1]), end): text for (begin, end), text in texts.items()}
                found = self._any(firsts, self._then(self._between, texts))
            if is_nullable(pattern):
                found = self._any(self._same, found)
            self._terminals[id(pattern)] = found
        return self._terminals[id(pattern)]

    def _texts(self, pattern: Pattern) -> Matrix:
        """A terminal by itself."""
        marks = ((False, False), (False, True), (True, False), (True, True))
        return {
            ((False, begin), (False, end)): self.terminal(part)
            for (begin, end), part in zip(marks, self._parts(pattern), strict=True)
            if part != NOTHING
        }

    def _any(self, *matrices: Matrix) -> Matrix:
        options: dict[Pair, list[str]] = defaultdict(list)
        for matrix in matrices:
            for pair, body in matrix.items():
                options[pair].append(body)
        return {pair: self._one_of(bodies) for pair, bodies in options.items()}

    def _then(self, first: Matrix, second: Matrix) -> Matrix:
        after: dict[State, list[tuple[State, str]]] = defaultdict(list)
        for (begin, end), body in second.items():
            after[begin].append((end, body))
        options: dict[Pair, list[str]] = defaultdict(list)
        for (begin, middle), body in first.items():
            for end, rest in after[middle]:
                texts = [text for text in (body, rest) if text != _NO_TEXT]
                options[begin, end].append(" ".join(texts) or _NO_TEXT)
        return {pair: self._one_of(bodies) for pair, bodies in options.items()}

    def _times(self, one: Matrix, least: int, most: int | None) -> Matrix:
        if most == 0:
            return self._same
        if all(begin == end for begin, end in one):
            shown = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
            bodies = {pair: body if body == _NO_TEXT else f"({body}){shown}" for pair, body in one.items()}
            return {**(self._same if least == 0 else {}), **bodies}
        rest = self._star(one) if most is None else self._at_most(one, most - least)
        return self._then(self._power(one, least), rest)

    def _power(self, one: Matrix, times: int) -> Matrix:
        if times < 2:
            return one if times else self._same
        half = self._power(one, times // 2)
        whole = self._then(half, half)
        return self._then(whole, one) if times % 2 else whole

    def _at_most(self, one: Matrix, times: int) -> Matrix:
        """Each number of times in one way only."""
        if times == 0:
            return self._same
        if times % 2 == 0:
            return self._any(self._same, self._then(one, self._at_most(one, times - 1)))
        half = self._at_most(one, times // 2)
        return self._any(half, self._then(self._power(one, times // 2 + 1), half))

    def _star(self, one: Matrix) -> Matrix:
        pairs = _repeated(frozenset(one), frozenset(self._same), 0, None)
        self._num_stars += 1
        names = {
            ((a, b), (c, d)): f"{self._prefix}s{self._num_stars}_{2 * a + b}{2 * c + d}" for (a, b), (c, d) in pairs
        }
        for begin, end in pairs:
            options = [_NO_TEXT] if begin == end else []
            for (middle, last), body in one.items():
                if last == end and (begin, middle) in pairs and not (middle == last and body == _NO_TEXT):
                    options.append(f"{names[begin, middle]} {body}")
            self._define(names[begin, end], " | ".join(options))
        return names

    def _one_of(self, bodies: Iterable[str]) -> str:
        options = list(dict.fromkeys(bodies))
        body = options[0] if len(options) == 1 else f"({' | '.join(options)})"
        return body if len(body) <= _MAX_INLINE else self._named(body, f"{self._prefix}p")

    # --- names

    def _rule_name(self, name: str, pair: Pair) -> str:
        begin, end = (2 * is_first + is_marked for is_first, is_marked in pair)
        return f"{self._prefix}r{self._numbers[name]}_{begin}{end}"

    def _named(self, body: str, kind: str) -> str:
        """The name of a definition with this body."""
        key = f"{kind}: {body}"
        if key not in self._names:
            self._names[key] = f"{kind}{len(self._names)}"
            self._define(self._names[key], body)
        return self._names[key]

    def _define(self, name: str, body: str) -> None:
        self._definitions[name] = body
        self._num_chars += len(name) + len(body) + 3
        if self._num_chars > MAX_CHARS:
            raise TooLargeError


def _references(rule: Rule) -> Iterable[str]:
    match rule:
        case Reference(name):
            yield name
        case InOrder(items) | OneOf(items):
            for item in items:
                yield from _references(item)
        case Times(item):
            yield from _references(item)


def _composed(first: Pairs, second: Pairs) -> Pairs:
    return frozenset((begin, end) for begin, middle in first for other, end in second if middle == other)


def _repeated(one: Pairs, same: Pairs, least: int, most: int | None) -> Pairs:
    """At least and at most so many times. Beyond the least, as many times as there are states lead everywhere."""
    known, power, times = same, one, least
    while times:
        if times % 2:
            known = _composed(known, power)
        power, times = _composed(power, power), times // 2
    for _ in range(len(same) if most is None else min(most - least, len(same))):
        known |= _composed(known, one)
    return known
