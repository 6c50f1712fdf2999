"""Stop patterns: regular expressions that end a sample where they first match its output.

Owns the limits on a pattern's cost, and the search of growing text. Patterns run in RE2. Its time is linear in the text, but with a
factor of the pattern's compiled size once its automaton has outgrown its memory, and there is a search at every token, so the work per token
is limited by SEARCH_COST. Samples share compiled patterns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

from headrace.errors import RequestError
from headrace.text.pattern_width import longest_match

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


def check_stop_regex(patterns: Sequence[str]) -> None:
    """Raises the errors of `compile_stop_patterns`."""
    compile_stop_patterns(tuple(patterns))


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


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """pattern: as the request gave it. Offsets count characters of the output: [start, end) is the match."""

    pattern: str
    start: int
    end: int


class PatternSearch:
    """Searches one sample's output as it grows."""

    def __init__(self, patterns: StopPatterns) -> None:
        self._patterns = patterns
        self._window = ""
        self._num_chars = 0

    def push(self, text: str) -> PatternMatch | None:
        """Take new text. Returns the match that ends first, and of several the one that begins first. Earlier text has no match."""
        self._num_chars += len(text)
        # Keep one character before the searched text, so that `^`, `\\A` and `\\b` know that the output does not begin there.
        self._window = window = (self._window + text)[-self._patterns.reach - len(text) - 1 :]
        first = self._num_chars - len(window)
        encoded = window.encode()
        best: PatternMatch | None = None
        for pattern in self._patterns.patterns:
            begin = max(1 if first else 0, len(window) - len(text) - pattern.reach)
            hit = pattern.compiled.search(encoded, len(window[:begin].encode()))
            if hit is None:
                continue
            start, end = (first + len(encoded[:at].decode()) for at in hit.span())
            if best is None or (end, start) < (best.end, best.start):
                best = PatternMatch(pattern.source, start, end)
        return best
