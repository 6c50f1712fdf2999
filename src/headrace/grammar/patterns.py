"""Regular languages as trees: what a terminal of a lark definition matches, and the same text as it is written within a JSON string.

A JSON string is written with the escapes of `ESCAPES` only, one way for each character, as `json.dumps(text, ensure_ascii=False)` writes it.
Other control characters would need \\u and cannot be written, as in the strings of JSON schemas (`json_schema.ESCAPES`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""What follows the backslash, by the character that is meant."""

MAX_CHARS = 1 << 20
"""Longest text of a tree."""

ASCII = frozenset(map(chr, range(128)))
_UNPLAIN = frozenset([*ESCAPES, *map(chr, range(0x20))])
_PLAIN = r'[^"\\\x00-\x1f]'
_META = frozenset("\\.+*?()|[]{}^$#&-~/")


class TooLargeError(ValueError):
    """The tree would exceed `MAX_CHARS`."""


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a class.

    text: the class as a regular expression, which may stand within brackets, too. ascii: its ASCII members. has_others: whether it may have
    others. ignores_case: upper and lower case are the same; `ascii` has both.
    """

    text: str
    ascii: frozenset[str]
    has_others: bool
    ignores_case: bool = False


@dataclass(frozen=True, slots=True)
class Sequenced:
    """One after the other; none is the empty text."""

    items: "tuple[Pattern, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of them; none is nothing at all."""

    items: "tuple[Pattern, ...]"


@dataclass(frozen=True, slots=True)
class Repeated:
    """At least and at most so many times; no `most` is no limit."""

    item: "Pattern"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class All:
    """What all of them match."""

    items: "tuple[Pattern, ...]"


@dataclass(frozen=True, slots=True)
class Not:
    """Any text that it does not match."""

    item: "Pattern"


Pattern = Characters | Sequenced | Choice | Repeated | All | Not

EMPTY = Sequenced(())
NOTHING = Choice(())


def character(char: str, ignores_case: bool = False) -> Characters:
    """This character."""
    cases = {char, char.lower(), char.upper()} if ignores_case else {char}
    return Characters(
        _shown(char),
        frozenset(case for case in cases if case in ASCII),
        char not in ASCII or len(cases) > 1,
        len(cases) > 1,
    )


def _shown(char: str) -> str:
    """A character in a regular expression of the library."""
    if char in _META:
        return "\\" + char
    return char if char.isprintable() else f"\\x{{{ord(char):x}}}"


def literal(text: str, ignores_case: bool = False) -> Pattern:
    """This text."""
    return sequenced(*(character(char, ignores_case) for char in text))


def sequenced(*items: Pattern) -> Pattern:
    """One after the other."""
    flat: list[Pattern] = []
    for item in items:
        if item == NOTHING:
            return NOTHING
        flat += item.items if isinstance(item, Sequenced) else (item,)
    return flat[0] if len(flat) == 1 else Sequenced(tuple(flat))


def choice(*items: Pattern) -> Pattern:
    """One of them."""
    flat: list[Pattern] = []
    for item in items:
        flat += item.items if isinstance(item, Choice) else (item,)
    return flat[0] if len(flat) == 1 else Choice(tuple(flat))


def repeated(item: Pattern, least: int, most: int | None) -> Pattern:
    """At least and at most so many times."""
    if most == 0 or item == EMPTY:
        return EMPTY
    if item == NOTHING:
        return NOTHING if least else EMPTY
    return item if least == most == 1 else Repeated(item, least, most)


def all_of(*items: Pattern) -> Pattern:
    """What all of them match."""
    if NOTHING in items:
        return NOTHING
    return items[0] if len(items) == 1 else All(items)


def is_nullable(pattern: Pattern) -> bool:
    """Whether the empty text matches."""
    match pattern:
        case Characters():
            return False
        case Choice(items):
            return any(map(is_nullable, items))
        case Sequenced(items) | All(items):
            return all(map(is_nullable, items))
        case Repeated(item, least):
            return least == 0 or is_nullable(item)
        case Not(item):
            return not is_nullable(item)


def ascii_members(pattern: Pattern) -> frozenset[str]:
    """The ASCII characters that its texts may have."""
    match pattern:
        case Characters():
            return pattern.ascii
        case Not():
            return ASCII
        case _:
            return frozenset().union(*map(ascii_members, _inner(pattern)))


def firsts(pattern: Pattern) -> frozenset[str]:
    """The ASCII characters that its texts may begin with."""
    match pattern:
        case Characters():
            return pattern.ascii
        case Sequenced(items):
            found: frozenset[str] = frozenset()
            for item in items:
                found |= firsts(item)
                if not is_nullable(item):
                    break
            return found
        case Choice(items):
            return frozenset().union(*map(firsts, items))
        case Repeated(item):
            return firsts(item)
        case All(items):
            return ASCII.intersection(*map(firsts, items))
        case Not():
            return ASCII


def follows(pattern: Pattern) -> frozenset[str]:
    """The ASCII characters with which a text of it may go on. Not known of a text that is the beginning of another choice."""
    match pattern:
        case Characters():
            return frozenset()
        case Sequenced(items):
            found: frozenset[str] = frozenset()
            for item in reversed(items):
                found |= follows(item)
                if not is_nullable(item):
                    break
                found |= firsts(item)
            return found
        case Choice(items):
            return frozenset().union(*map(follows, items))
        case Repeated(item, least, most):
            return follows(item) if least == most else follows(item) | firsts(item)
        case All(items):
            return ASCII.intersection(*map(follows, items))
        case Not():
            return ASCII


# --- within a JSON string


def _class(text: str, has_others: bool = True) -> Characters:
    return Characters(text, frozenset(), has_others)


_BACKSLASH = character("\\")
_LETTER = _class(r'["\\bfnrt]')
_ANY_ESCAPED = Repeated(Choice((_class(_PLAIN), Sequenced((_BACKSLASH, _LETTER)))), 0, None)
ANY_TEXT: Pattern = Repeated(_class(r"[\s\S]"), 0, None)


def _plain(one: Characters) -> Pattern:
    """Its members that stand for themselves."""
    if not one.has_others and one.ascii <= _UNPLAIN:
        return NOTHING
    if not one.ascii & _UNPLAIN:
        return one
    return Characters(f"[{one.text}&&{_PLAIN}]", one.ascii - _UNPLAIN, one.has_others, one.ignores_case)


def _letters(one: Characters) -> Pattern:
    """What follows the backslash of its members that are escaped."""
    return choice(*(character(ESCAPES[char]) for char in ESCAPES if char in one.ascii))


def escaped(pattern: Pattern) -> Pattern:
    """The same texts as they are within a JSON string."""
    match pattern:
        case Characters():
            return choice(_plain(pattern), sequenced(_BACKSLASH, _letters(pattern)))
        case Sequenced(items):
            return sequenced(*map(escaped, items))
        case Choice(items):
            return choice(*map(escaped, items))
        case Repeated(item, least, most):
            return repeated(escaped(item), least, most)
        case All(items):
            return all_of(*map(escaped, items))
        case Not(item):
            return All((_ANY_ESCAPED, Not(escaped(item))))


def starts(pattern: Pattern) -> tuple[Pattern, Pattern]:
    """Of what `escaped` matches and is not empty: what begins with no backslash, and what follows a backslash that it begins with.

    Raises TooLargeError where many parts may be left out one after the other.
    """
    match pattern:
        case Characters():
            return _plain(pattern), _letters(pattern)
        case Sequenced(items):
            return _starts_in_sequence(items)
        case Choice(items):
            parts = [starts(item) for item in items]
            return choice(*(part[0] for part in parts)), choice(*(part[1] for part in parts))
        case Repeated(item, least, most):
            fewest = 0 if is_nullable(item) else max(least - 1, 0)
            rest = repeated(escaped(item), fewest, None if most is None else most - 1)
            plain, after = starts(item)
            return sequenced(plain, rest), sequenced(after, rest)
        case All(items):
            parts = [starts(item) for item in items]
            return all_of(*(part[0] for part in parts)), all_of(*(part[1] for part in parts))
        case Not(item):
            plain, after = starts(item)
            return (
                All((Sequenced((_class(_PLAIN), _ANY_ESCAPED)), _not(plain))),
                All((Sequenced((_LETTER, _ANY_ESCAPED)), _not(after))),
            )


def _not(pattern: Pattern) -> Pattern:
    return ANY_TEXT if pattern == NOTHING else Not(pattern)


def _starts_in_sequence(items: Sequence[Pattern]) -> tuple[Pattern, Pattern]:
    whole = [escaped(item) for item in items]
    plains, afters = [], []
    num_parts = 0
    for number, item in enumerate(items):
        num_parts += len(items) - number
        if num_parts > MAX_CHARS // 16:
            raise TooLargeError
        plain, after = starts(item)
        plains.append(sequenced(plain, *whole[number + 1 :]))
        afters.append(sequenced(after, *whole[number + 1 :]))
        if not is_nullable(item):
            break
    return choice(*plains), choice(*afters)


# --- writing


def written(pattern: Pattern) -> str:
    """A pattern as the body of a lark terminal. Raises TooLargeError."""
    if num_chars(pattern) > MAX_CHARS:
        raise TooLargeError
    return _lark(pattern)


def num_chars(pattern: Pattern) -> int:
    """About how many characters `written` gives, found without writing parts again that are shared."""
    known: dict[int, int] = {}

    def count(one: Pattern) -> int:
        if id(one) not in known:
            inner = _inner(one)
            known[id(one)] = len(one.text) + 6 if isinstance(one, Characters) else 8 + sum(map(count, inner))
        return known[id(one)]

    return count(pattern)


def _inner(pattern: Pattern) -> Iterable[Pattern]:
    match pattern:
        case Sequenced(items) | Choice(items) | All(items):
            return items
        case Repeated(item) | Not(item):
            return (item,)
        case _:
            return ()


def _is_regular(pattern: Pattern) -> bool:
    """Whether a regular expression can write it, which has neither `&` nor `~`."""
    return not isinstance(pattern, All | Not) and all(map(_is_regular, _inner(pattern)))


def _lark(pattern: Pattern) -> str:
    if pattern == EMPTY:
        return '""'
    if _is_regular(pattern):
        return f"/{_regex(pattern)}/"
    match pattern:
        case All(items):
            return f"({' & '.join(map(_lark, items))})"
        case Not(item):
            return f"~({_lark(item)})"
        case _:
            return _joined(pattern, _lark, " ", ("(", ")"))


def _regex(pattern: Pattern) -> str:
    if isinstance(pattern, Characters):
        return f"(?i:{pattern.text})" if pattern.ignores_case else pattern.text
    return _joined(pattern, _regex, "", ("(?:", ")"))


def _joined(pattern: Pattern, write: Callable[[Pattern], str], between: str, brackets: tuple[str, str]) -> str:
    begin, end = brackets
    match pattern:
        case Sequenced(items):
            return between.join(map(write, items)) or f"{begin}{end}"
        case Choice(items):
            return f"{begin}{'|'.join(map(write, items))}{end}"
        case Repeated(item, least, most):
            shown = write(item) if isinstance(item, Characters | Choice) else f"{begin}{write(item)}{end}"
            return shown + _times(least, most)
        case _:
            raise AssertionError(pattern)


def _times(least: int, most: int | None) -> str:
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    if (least, most) in known:
        return known[least, most]
    return f"{{{least},{'' if most is None else most}}}"
