"""How long a match of a regular expression can be, from its text alone.

Reads the syntax of RE2 (https://github.com/google/re2/wiki/Syntax), for patterns that RE2 has already accepted. The result may be
too large but never too small; syntax that is not understood counts as unbounded. Pure functions, no state.
"""

import re

_MAX_DEPTH = 50
_COUNT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_GROUP = re.compile(r"\?(?:P?<\w+>|[imsU-]*:)")
_FLAGS = re.compile(r"\?[imsU-]*\)")
_ESCAPE = re.compile(r"[pP](?:\{[^}]*\}|.)|x(?:\{[0-9A-Fa-f]+\}|[0-9A-Fa-f]{2})|[0-7]{1,3}|.", re.DOTALL)
_EMPTY_ESCAPES = frozenset("AbBz")


class _NotUnderstood(Exception):
    """The pattern contains syntax that this reader does not know."""


def longest_match(pattern: str) -> int | None:
    """Length of the longest match of `pattern`, in characters; None if unbounded or unknown."""
    reader = _Reader(pattern)
    try:
        width = reader.alternatives(0)
    except _NotUnderstood:
        return None
    return width if reader.at == len(pattern) else None


class _Reader:
    """Recursive descent over one pattern. A width of None has no bound. at: the next character."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def alternatives(self, depth: int) -> int | None:
        """Up to the closing bracket of the group, or the end."""
        if depth > _MAX_DEPTH:
            raise _NotUnderstood
        widths = [self._sequence(depth)]
        while self._takes("|"):
            widths.append(self._sequence(depth))
        bounded = [width for width in widths if width is not None]
        return max(bounded) if len(bounded) == len(widths) else None

    def _sequence(self, depth: int) -> int | None:
        total: int | None = 0
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            width = self._repeated(self._atom(depth))
            total = None if total is None or width is None else total + width
        return total

    def _atom(self, depth: int) -> int | None:
        char = self.pattern[self.at]
        self.at += 1
        match char:
            case "(":
                return self._group(depth)
            case "[":
                self._skip_class()
            case "\\":
                return self._escape()
            case "^" | "$":
                return 0
        return 1

    def _group(self, depth: int) -> int | None:
        if flags := _FLAGS.match(self.pattern, self.at):
            self.at = flags.end()
            return 0
        if opening := _GROUP.match(self.pattern, self.at):
            self.at = opening.end()
        width = self.alternatives(depth + 1)
        if not self._takes(")"):
            raise _NotUnderstood
        return width

    def _escape(self) -> int:
        escape = _ESCAPE.match(self.pattern, self.at)
        # \Q quotes what follows, up to \E.
        if escape is None or escape[0] in ("Q", "E"):
            raise _NotUnderstood
        self.at = escape.end()
        return 0 if escape[0] in _EMPTY_ESCAPES else 1

    def _skip_class(self) -> None:
        """The rest of a character class; a closing bracket that comes first stands for itself."""
        self._takes("^")
        self._takes("]")
        while not self._takes("]"):
            if self.pattern.startswith("[:", self.at):
                end = self.pattern.find(":]", self.at)
                self.at = end + 2 if end >= 0 else self.at + 1
            elif self._takes("\\"):
                self._escape()
            else:
                self.at += 1
            if self.at >= len(self.pattern):
                raise _NotUnderstood

    def _repeated(self, width: int | None) -> int | None:
        while True:
            if self._takes("*") or self._takes("+"):
                width = 0 if width == 0 else None
            elif count := _COUNT.match(self.pattern, self.at):
                self.at = count.end()
                most = count[1] if count[2] is None else count[3]
                width = 0 if width == 0 else None if width is None or not most else width * int(most)
            elif not self._takes("?"):
                return width

    def _takes(self, char: str) -> bool:
        found = self.pattern.startswith(char, self.at)
        self.at += found
        return found
