"""How many tokens are worth guessing, by how often the last guesses were right, also those that no step computed.

A drafter always has a guess in mind, and is right or wrong about the next token whether a step computes the guess or not. So each sequence has a
chance that its next guess is right, and k guesses in a row give p + p^2 + ... + p^k tokens more. They lengthen the step: `StepTimes` says how much.
Guesses are added from the best to the worst, as many as give the most tokens in the time. A model that guesses token by token takes time, too: a
pass for the next token of all rows.

What a token more costs depends on the machine and on the weights: next to nothing up to eight where products of 8-bit integers are fast (VNNI), a
third of a step for 4-bit weights on AVX2. So a worker on a CPU measures it before its first step (`execution.step_times`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.messages.step import MOST_VERIFIED

WAIT_S = 0.0003
"""If anything is guessed, the step after it cannot be planned before it has ended: what that takes, seconds."""

FIRST_CHANCE = 0.5
_MEMORY = 0.85
"""Weight of all earlier guesses when the next one turns out right or wrong: the last seven count most."""

_NOTICED = 1.05
"""Times as many tokens in the same time, that guesses must promise: a chance is known from a few guesses only, and is believed most when it is
overestimated, so that text without repetitions would lose what it seems to gain."""

_OFTEN = 0.8
_LEAST_GAIN = 1.1
"""Guessing is worth its trouble where text whose guesses are right that often gets so many times as fast, with one request at a time."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long a step takes that samples from all of its tokens, in steps of one token.

    by_tokens: of a step of n tokens, at index n, from 1 on; beyond the last one it grows as before. wait: see `WAIT_S`.
    """

    by_tokens: tuple[float, ...]
    wait: float

    @classmethod
    def measured(cls, seconds: Mapping[int, float]) -> "StepTimes":
        """seconds: of steps of these numbers of tokens, 1 and more. Between two of them time grows steadily. None is longer than one of more tokens:
        if it seems so, something else has delayed it."""
        counts = sorted(seconds)
        least = {count: min(seconds[more] for more in counts if more >= count) for count in counts}
        base = least[1]
        times = [0.0, 1.0]
        slope = 0.0
        for first, last in pairwise(counts):
            slope = (least[last] - least[first]) / base / (last - first)
            times += [times[first] + slope * place for place in range(1, last - first + 1)]
        last = len(times) - 1
        times += [times[last] + slope * place for place in range(1, MOST_VERIFIED - last + 1)]
        return cls(tuple(times), WAIT_S / base)

    @property
    def summary(self) -> str:
        """For people."""
        few, many = self.by_tokens[4], self.by_tokens[16]
        return f"a step of 4 tokens takes {few:.2f}, of 16 tokens {many:.2f} times as long as one of 1 token"

    @property
    def pays(self) -> bool:
        """Whether guesses are worth their cost anywhere."""
        most = min(16, len(self.by_tokens) - 2)
        [length] = worthwhile([_OFTEN], [most], self)
        tokens = sum(_OFTEN**place for place in range(length + 1))
        return bool(length) and tokens / (self.by_tokens[1 + length] + self.wait) >= _LEAST_GAIN


USUAL = StepTimes.measured({1: 0.006, 8: 0.006, 16: 0.0089})
"""Where nothing is measured: about that of SmolLM2 in int8 on two cores with VNNI."""
SLOW = StepTimes.measured({1: 0.0067, 8: 0.016, 16: 0.027})
"""The same with AVX2."""


def learnt(chance: float, is_right: bool) -> float:
    """The chance of a sequence, after a guess has turned out right or wrong. Guesses after a wrong one say nothing."""
    return _MEMORY * chance + (1.0 - _MEMORY) * is_right


def learnt_from(chance: float, ids: Sequence[int], guessed: Sequence[int]) -> float:
    """The chance of a sequence, after these ids have come in place of those that were guessed."""
    for token_id, guess in zip(ids, guessed, strict=False):
        chance = learnt(chance, token_id == guess)
        if token_id != guess:
            break
    return chance


def worthwhile(
    chances: Sequence[float], guessed: Sequence[int], times: StepTimes = USUAL, pass_time: float = 0.0
) -> list[int]:
    """How many of the guessed[i] tokens of each row of a step to compute in the next one. All zero if nothing pays.

    chances: of the rows. pass_time: what it takes to guess one more token after those of all rows, where a model guesses; in steps of one token.
    """
    num_rows = len(chances)
    best, best_rate = [0] * num_rows, _NOTICED * num_rows / times.by_tokens[num_rows]
    most = max(guessed)
    for deepest in range(1, most + 1) if pass_time else (most,):
        of_rows = [min(count, deepest) for count in guessed]
        lengths, rate = _filled(chances, of_rows, times, times.wait + deepest * pass_time)
        if rate > best_rate:
            best, best_rate = lengths, rate
    return best


def _filled(
    chances: Sequence[float], guessed: Sequence[int], times: StepTimes, more_time: float
) -> tuple[list[int], float]:
    """The number of each row's guesses with which a step gives the most tokens in its time, and how many that are. more_time: beside its tokens."""
    num_rows = len(chances)
    gains = [(chance**place, row) for row, chance in enumerate(chances) for place in range(1, guessed[row] + 1)]
    gains = sorted(gains, reverse=True)[: MOST_VERIFIED - num_rows]
    tokens = float(num_rows)
    best_count, best_rate = 0, tokens / (times.by_tokens[num_rows] + more_time)
    for count, (gain, _) in enumerate(gains, start=1):
        tokens += gain
        rate = tokens / (times.by_tokens[num_rows + count] + more_time)
        if rate > best_rate:
            best_count, best_rate = count, rate
    lengths = [0] * num_rows
    for _, row in gains[:best_count]:
        lengths[row] += 1
    return lengths, best_rate
