"""Stop strings and stop patterns in text that grows token by token.

Owns the decision at which token a stop completes (`StopMatcher`), and how much text must wait because it may be the
beginning of a stop (`HoldBack`). Stop token ids, EOS and lengths are the scheduler's. No torch; one object per request.

Stop strings are found by the automaton of Aho and Corasick (Efficient string matching, CACM 1975): one step a character,
whatever the number of strings. Patterns run in RE2, whose time is linear in the text.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

from headrace.errors import RequestError
from headrace.text.incremental import IncrementalDecoder

MAX_STOP_PATTERNS = 32
MAX_REGEX_CHARS = 1024
REGEX_WINDOW_CHARS = 4096  # a match of a stop pattern that is longer is not found
_REGEX_MEMORY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop that completed with the token just pushed.

    matched: the stop string, or the pattern, as the request gave it. Offsets count characters of the decoded output:
    [start, end) is the match. cut: where the shown text ends when stops are trimmed, which is `start` for a string and
    everything so far for a pattern, since pattern matches are not trimmed.
    """

    matched: str
    start: int
    end: int
    cut: int


def check_stop_regex(patterns: Sequence[str]) -> None:
    """Raise RequestError for patterns that RE2 does not take (look-around, back references), or that match nothing at all."""
    if len(patterns) > MAX_STOP_PATTERNS:
        raise RequestError(f"{len(patterns)} stop patterns; at most {MAX_STOP_PATTERNS}", param="stop_regex")
    for pattern in patterns:
        _compile(pattern)


@lru_cache(maxsize=256)
def _compile(pattern: str) -> Any:
    """The compiled pattern (RE2 ships no types). Raises RequestError."""
    if len(pattern) > MAX_REGEX_CHARS:
        raise RequestError(
            f"a stop pattern has {len(pattern)} characters; at most {MAX_REGEX_CHARS}", param="stop_regex"
        )
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _REGEX_MEMORY_BYTES
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as err:
        reason = err.args[0].decode(errors="replace") if err.args and isinstance(err.args[0], bytes) else str(err)
        raise RequestError(f"stop pattern {pattern!r} is not accepted: {reason}", param="stop_regex") from None
    except UnicodeEncodeError:
        raise RequestError("a stop pattern is not valid Unicode", param="stop_regex") from None
    if compiled.search("") is not None:
        raise RequestError(
            f"stop pattern {pattern!r} matches the empty text, so it would stop at once", param="stop_regex"
        )
    return compiled


class StopAutomaton:
    """The trie of a set of strings with the failure links of Aho and Corasick.

    A state is the longest suffix of the text that begins one of the strings; state 0 is the empty one.
    depth[state]: its length. found[state]: the longest string that ends here, or None.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """strings: non-empty."""
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for text in strings:
            state = 0
            for char in text:
                state = self._next[state].setdefault(char, len(self._next))
                if state == len(self._next):
                    self._next.append({})
                    self.depth.append(0)
                    self.found.append(None)
            self.found[state] = text
        self._fail = [0] * len(self._next)
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for char, child in self._next[state].items():
                self.depth[child] = self.depth[state] + 1
                self._fail[child] = self.step(self._fail[state], char) if state else 0
                self.found[child] = self.found[child] or self.found[self._fail[child]]
                waiting.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character; amortised constant time over a text."""
        while True:
            following = self._next[state].get(char)
            if following is not None:
                return following
            if not state:
                return 0
            state = self._fail[state]


class StopMatcher:
    """Watches the output of one request.

    The decoder is this matcher's own and starts after the prompt, so a stop inside the prompt does not count. Of several
    stop strings the one that completes first in the text wins, and of those that complete at the same character the
    longest: the answer does not depend on how the text was split in tokens. A string wins over a pattern that matches with the
    same token.
    """

    def __init__(self, stop: Sequence[str], stop_regex: Sequence[str], decoder: IncrementalDecoder) -> None:
        """Raises RequestError as `check_stop_regex`."""
        self._decoder = decoder
        self._automaton = StopAutomaton(stop)
        self._state = 0
        self._patterns = [(pattern, _compile(pattern)) for pattern in stop_regex]
        self._window = ""  # the last characters, for the patterns
        self._num_chars = 0

    def push(self, token_id: int) -> StopMatch | None:
        """Take one output token; the stop that it completes, if any. After a match the matcher is finished."""
        text = self._decoder.push(token_id)
        if not text:
            return None
        before = self._num_chars
        self._num_chars += len(text)
        step, found = self._automaton.step, self._automaton.found
        for offset, char in enumerate(text, start=before + 1):
            self._state = step(self._state, char)
            if (matched := found[self._state]) is not None:
                start = offset - len(matched)
                return StopMatch(matched, start, offset, cut=start)
        return self._match_patterns(text) if self._patterns else None

    def _match_patterns(self, text: str) -> StopMatch | None:
        # One character before the searched ones stays, so that `^`, `\A` and `\b` see that the output did not begin there.
        self._window = (self._window + text)[-max(REGEX_WINDOW_CHARS, len(text)) - 1 :]
        first = self._num_chars - len(self._window)
        begin = 1 if first else 0
        best: StopMatch | None = None
        for pattern, compiled in self._patterns:
            hit = compiled.search(self._window, begin)
            if hit is None:
                continue
            start, end = hit.span()
            match = StopMatch(pattern, first + start, first + end, cut=self._num_chars)
            if best is None or (match.end, match.start) < (best.end, best.start):
                best = match
        return best


class HoldBack:
    """Delays text that may be the beginning of a stop string, and no more of it than that.

    At any time the text held is the longest suffix that begins a stop, so it is shorter than the longest stop or is a stop.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._automaton = StopAutomaton(stop)
        self._state = 0
        self._held = ""

    @property
    def held(self) -> str:
        """The text waiting."""
        return self._held

    def push(self, text: str) -> str:
        """Take new text; the text that can no longer be part of a stop, in order."""
        for char in text:
            self._state = self._automaton.step(self._state, char)
        text = self._held + text
        keep = len(text) - self._automaton.depth[self._state]
        self._held = text[keep:]
        return text[:keep]
