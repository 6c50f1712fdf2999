"""Stop strings and stop patterns in text that grows token by token.

Owns the decision at which token a stop completes (`StopMatcher`), the text that must wait because it may be the beginning of a stop
(`HoldBack`), and the limits on what a pattern costs. The scheduler handles stop token ids, EOS and lengths. No torch; one object per request.

No data structure is built from the stop strings: the end of the text (or a possible beginning of a stop) is compared with each of them, which
is one native comparison per string. So the memory of a sample is only its text, however long its stops are.

Patterns run in RE2. Its time is linear in the text, but with a factor of the pattern's compiled size once its automaton has outgrown its memory, and
there is a search at every token, so the work per token is limited by SEARCH_COST. Samples share compiled patterns.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

from headrace.errors import RequestError
from headrace.text.incremental import IncrementalDecoder


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop that completed with the token just pushed.

    matched: the stop string, or the pattern, as the request gave it. Offsets count characters of the decoded output:
    [start, end) is the match. cut: where the visible text ends if stops are trimmed: `start` for a string, and
    the end of the text for a pattern, since pattern matches are not trimmed.
    """

    matched: str
    start: int
    end: int
    cut: int


class StopMatcher:
    """Watches the output of one request.

    The matcher has its own decoder, which starts after the prompt, so a stop inside the prompt does not count. Of several
    stop strings the one that completes first in the text wins, and of those that complete at the same character the
    longest: the result does not depend on how the text is split into tokens. A string wins over a pattern that matches with the
    same token.
    """

    def __init__(self, stop: Sequence[str], stop_regex: Sequence[str], decoder: IncrementalDecoder) -> None:
        """stop: non-empty strings. Raises RequestError as `compile_stop_patterns`."""
        self._decoder = decoder
        self._stop = tuple(stop)
        self._num_kept = max(map(len, self._stop), default=1) - 1
        self._tail = ""  # the last characters, in which a stop may have begun
        self._num_chars = 0
        self._search = PatternSearch(compile_stop_patterns(tuple(stop_regex))) if stop_regex else None

    def push(self, token_id: int) -> StopMatch | None:
        """Take one output token. Returns the stop that it completes, if any; then the matcher is finished."""
        text = self._decoder.push(token_id)
        if not text:
            return None
        if self._stop and (match := self._match_strings(text)) is not None:
            return match
        self._num_chars += len(text)
        return None if self._search is None else self._search.push(text)

    def _match_strings(self, text: str) -> StopMatch | None:
        seen = self._tail + text
        first = self._num_chars - len(self._tail)
        for end in range(len(self._tail) + 1, len(seen) + 1):
            if seen.endswith(self._stop, 0, end):
                matched = max((stop for stop in self._stop if seen.endswith(stop, 0, end)), key=len)
                start = first + end - len(matched)
                return StopMatch(matched, start, first + end, cut=start)
        self._tail = seen[len(seen) - self._num_kept :] if self._num_kept < len(seen) else seen
        return None


class HoldBack:
    """Holds back text that may be the beginning of a stop string, and no more than that.

    At any time the text held is the longest suffix that begins a stop, so it is shorter than the longest stop or is a stop.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    @property
    def held(self) -> str:
        return self._held

    def push(self, text: str) -> str:
        """Take new text. Returns the text that can no longer be part of a stop."""
        if not text:
            return ""
        text = self._held + text
        # Text that does not begin a stop now never will, so released text is never checked again.
        for start in range(max(0, len(text) - self._longest), len(text)):
            if self._begins_stop(text, start):
                break
        else:
            start = len(text)
        self._held = text[start:]
        return text[:start]

    def _begins_stop(self, text: str, start: int) -> bool:
        length, first, last = len(text) - start, text[start], text[-1]
        return any(
            stop[0] == first and len(stop) >= length and stop[length - 1] == last and text.endswith(stop[:length])
            for stop in self._stop
        )


MAX_STOP_PATTERNS = 32
MAX_REGEX_CHARS = 1024
MAX_WINDOW_CHARS = 4096
MIN_WINDOW_CHARS = 256
SEARCH_COST = 1 << 16
"""Limit of instructions times characters per token: well under a millisecond, even if the automaton does not fit in memory."""

_NEW_CHARS = 8
"""Approximate number of characters per token, which are searched in addition to those before them."""
_MEMORY_BYTES = 1 << 16
_CACHED_SETS = 128


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern (RE2 ships no types). reach: a match that ends in new text begins at most this many characters before it."""

    source: str
    compiled: Any
    reach: int


@dataclass(frozen=True, slots=True)
class StopPatterns:
    """The patterns of a request. reach: the largest one of the patterns."""

    patterns: tuple[Pattern, ...]
    reach: int


@lru_cache(maxsize=_CACHED_SETS)
def compile_stop_patterns(sources: tuple[str, ...]) -> StopPatterns:
    """Check and compile the patterns.

    Raises RequestError for syntax that RE2 does not support (look-around, back references), patterns that match the empty text, and
    patterns that would cost too much at every token.
    """
    if len(sources) > MAX_STOP_PATTERNS:
        raise RequestError(f"{len(sources)} stop patterns; at most {MAX_STOP_PATTERNS}", param="stop_regex")
    compiled = [_compile(source) for source in sources]
    # A match may be certain only when the next character is known: `\B` at its end.
    bounds = [None if (width := longest_match(source)) is None else width + 1 for source in sources]
    cost = open_size = 0
    for each, bound in zip(compiled, bounds, strict=True):
        if bound is None or bound > MAX_WINDOW_CHARS:
            open_size += each.programsize
        else:
            cost += each.programsize * (bound + _NEW_CHARS)
    window = min(MAX_WINDOW_CHARS, (SEARCH_COST - cost) // open_size) if open_size else 0
    if cost > SEARCH_COST or (open_size and window < MIN_WINDOW_CHARS):
        raise RequestError(
            "the stop patterns would take too long after every token: their compiled size times the longest match is more "
            f"than {SEARCH_COST} (a pattern without a longest match, as with * or +, counts as {MIN_WINDOW_CHARS} characters); "
            "use fewer or simpler ones",
            param="stop_regex",
        )
    patterns = tuple(
        Pattern(source, each, window if bound is None else min(bound, MAX_WINDOW_CHARS))
        for source, each, bound in zip(sources, compiled, bounds, strict=True)
    )
    return StopPatterns(patterns, max((pattern.reach for pattern in patterns), default=0))


def _compile(source: str) -> Any:
    if len(source) > MAX_REGEX_CHARS:
        raise RequestError(
            f"a stop pattern has {len(source)} characters; at most {MAX_REGEX_CHARS}", param="stop_regex"
        )
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY_BYTES
    options.never_capture = True
    try:
        compiled = re2.compile(source, options)
    except re2.error as err:
        reason = err.args[0].decode(errors="replace") if err.args and isinstance(err.args[0], bytes) else str(err)
        raise RequestError(f"stop pattern {source!r} is not accepted: {reason}", param="stop_regex") from None
    except UnicodeEncodeError:
        raise RequestError("a stop pattern is not valid Unicode", param="stop_regex") from None
    if compiled.search("") is not None:
        raise RequestError(
            f"stop pattern {source!r} matches the empty text, so it would stop at once", param="stop_regex"
        )
    return compiled


class PatternSearch:
    def __init__(self, patterns: StopPatterns) -> None:
        self._patterns = patterns
        self._window = ""
        self._num_chars = 0

    def push(self, text: str) -> StopMatch | None:
        """Take new text. Returns the match that ends first, and of several the one that begins first. Earlier text has no match."""
        self._num_chars += len(text)
        # Keep one character before the searched text, so that `^`, `\\A` and `\\b` know that the output does not begin there.
        self._window = window = (self._window + text)[-self._patterns.reach - len(text) - 1 :]
        first = self._num_chars - len(window)
        encoded = window.encode()
        best: StopMatch | None = None
        for pattern in self._patterns.patterns:
            begin = max(1 if first else 0, len(window) - len(text) - pattern.reach)
            hit = pattern.compiled.search(encoded, len(window[:begin].encode()))
            if hit is None:
                continue
            start, end = (first + len(encoded[:at].decode()) for at in hit.span())
            if best is None or (end, start) < (best.end, best.start):
                best = StopMatch(pattern.source, start, end, cut=self._num_chars)
        return best


_MAX_GROUPS = 50
_REPEAT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_GROUP = re.compile(r"\?(?:P?<\w+>|[imsU-]*:)")
_FLAGS = re.compile(r"\?[imsU-]*\)")
_ESCAPED = re.compile(r"[pP](?:\{[^}]*\}|.)|x(?:\{[0-9A-Fa-f]+\}|[0-9A-Fa-f]{2})|[0-7]{1,3}|.", re.DOTALL)
_EMPTY_ESCAPES = frozenset("AbBz")


class _NotUnderstood(Exception):
    """The pattern contains syntax that this reader does not know."""


def longest_match(pattern: str) -> int | None:
    """Length of the longest match of `pattern`, in characters; None if unbounded or unknown."""
    reader = _WidthReader(pattern)
    try:
        width = reader.alternatives(0)
    except _NotUnderstood:
        return None
    return width if reader.at == len(pattern) else None


class _WidthReader:
    """Recursive descent over one pattern. A width of None has no bound. at: the next character."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def alternatives(self, depth: int) -> int | None:
        """Up to the closing bracket of the group, or the end."""
        if depth > _MAX_GROUPS:
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
        escape = _ESCAPED.match(self.pattern, self.at)
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
            elif count := _REPEAT.match(self.pattern, self.at):
                self.at = count.end()
                most = count[1] if count[2] is None else count[3]
                width = 0 if width == 0 else None if width is None or not most else width * int(most)
            elif not self._takes("?"):
                return width

    def _takes(self, char: str) -> bool:
        found = self.pattern.startswith(char, self.at)
        self.at += found
        return found
