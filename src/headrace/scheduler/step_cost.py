"""How long a step takes, learnt from the steps' own times.

    seconds = c0 * tokens + c1 * attended + c2 * sampled + c3        (no c is negative)

The products of a step grow with its tokens, attention with the positions that they see, the output projection with the rows that sample,
and reading the weights takes the same time for any step. Least squares of the relative error with exponential forgetting (Ljung 1999,
"System Identification", ch. 11), kept as normal equations and solved by coordinate descent from the last solution (Wright 2015, "Coordinate
descent algorithms", Mathematical Programming 151). So no coefficient becomes negative, one that the recent steps say nothing about stays,
and of the very first step all time is put down to its tokens.

Owns no clock: the same steps and times give the same numbers. Runs in the scheduler's thread.
"""

import math
from typing import NamedTuple

import numpy as np

FORGETTING = 0.95
"""Weight of all earlier steps when a step with prompt tokens is learnt: the last twenty count most."""

OUTLIER = 1.5
"""A step of a familiar size counts as at most this many times longer or shorter than expected: other processes may have had the cores."""

_BELIEVED = 3
"""After so many such steps in a row, all longer or all shorter, it is the machine that has another speed: all that is known is scaled."""

_SWEEPS = 4
"""Rounds over the coefficients when a step is learnt; the next step's rounds continue from there."""

_Features = tuple[float, float, float, float]


class StepWork(NamedTuple):
    """What a step computes. attended: over all tokens, the positions that each sees. sampled: rows that give a token."""

    tokens: int
    attended: float
    sampled: int


class StepCost:
    """The model, and what it has learnt. most_tokens: of the largest step that it has learnt from, 0 = it knows nothing yet."""

    def __init__(self) -> None:
        self.most_tokens = 0
        self._cost = [0.0] * 4
        self._moments = np.zeros((4, 4))
        self._targets = np.zeros(4)
        self._outliers: list[float] = []

    def seconds(self, work: StepWork) -> float:
        """Expected time of a step; 0.0 while nothing is known."""
        return sum(c * x for c, x in zip(self._cost, _features(work), strict=True))

    def prompt_seconds(self, start: int, count: int, sampled: int = 0) -> float:
        """Part of that for `count` tokens of a prompt from position `start` on, the last of which is sampled from if `sampled` is 1."""
        return count * (self._cost[0] + self._cost[1] * (start + 0.5 * count)) + sampled * self._cost[2]

    def prompt_tokens(self, start: int, seconds: float) -> float:
        """How many tokens of a prompt, from position `start` on, take `seconds`; infinite if they seem to cost nothing."""
        if seconds == math.inf:
            return math.inf
        slope = self._cost[0] + self._cost[1] * start
        # The positive root of slope n + c1 n^2 / 2 = seconds, in the form that also holds for c1 = 0.
        divisor = slope + math.sqrt(slope * slope + 2 * self._cost[1] * seconds)
        return 2 * seconds / divisor if divisor > 0 else math.inf

    def learn(self, work: StepWork, seconds: float) -> None:
        """A step has taken `seconds`."""
        if seconds <= 0:
            return
        features, scale = _features(work), seconds
        expected = self.seconds(work)
        if work.tokens <= self.most_tokens and expected > 0:
            expected *= self._new_pace(seconds / expected)
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
            scale = expected
        x = np.array(features) / scale
        self._moments = FORGETTING * self._moments + np.outer(x, x)
        self._targets = FORGETTING * self._targets + x * (seconds / scale)
        self._solve()
        self.most_tokens = max(self.most_tokens, work.tokens)

    def _new_pace(self, ratio: float) -> float:
        """A step took `ratio` times what was expected. Returns how many times longer than before all steps are expected to take from now on."""
        if 1 / OUTLIER <= ratio <= OUTLIER:
            self._outliers.clear()
            return 1.0
        if self._outliers and (self._outliers[0] > 1) != (ratio > 1):
            self._outliers.clear()
        self._outliers.append(ratio)
        if len(self._outliers) < _BELIEVED:
            return 1.0
        pace = min(self._outliers, key=lambda ratio: abs(math.log(ratio)))
        self._outliers.clear()
        self._targets *= pace
        self._cost = [pace * cost for cost in self._cost]
        return pace

    def _solve(self) -> None:
        """Move each coefficient in turn to where the error is least while the others stay."""
        moments, targets, cost = self._moments.tolist(), self._targets.tolist(), self._cost
        for _ in range(_SWEEPS):
            for i, (m0, m1, m2, m3) in enumerate(moments):
                if (own := moments[i][i]) > 0:
                    excess = m0 * cost[0] + m1 * cost[1] + m2 * cost[2] + m3 * cost[3] - targets[i]
                    cost[i] = max(0.0, cost[i] - excess / own)


def _features(work: StepWork) -> _Features:
    return work.tokens, work.attended, work.sampled, 1.0
