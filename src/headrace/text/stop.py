"""Stop strings and stop patterns in text that grows token by token.

Owns the decision at which token a stop completes (`StopMatcher`), and the text that must wait because it may be the
beginning of a stop (`HoldBack`). The scheduler handles stop token ids, EOS and lengths. No torch; one object per request.

No data structure is built from the stop strings: the end of the text (or a possible beginning of a stop) is compared with each of them, which
is one native comparison per string. So the memory of a sample is only its text, however long its stops are. Patterns: `stop_patterns`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.text.incremental import IncrementalDecoder
from headrace.text.stop_patterns import PatternSearch, compile_stop_patterns


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
        if self._search is None or (found := self._search.push(text)) is None:
            return None
        return StopMatch(found.pattern, found.start, found.end, cut=self._num_chars)

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
        """stop: non-empty strings."""
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    @property
    def held(self) -> str:
        """The text held back."""
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
