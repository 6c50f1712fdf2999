"""How long a step takes, learnt from the steps' own times, and how many prompt tokens it may therefore compute.

    seconds = c0 * tokens + c1 * attended + c2 * sampled + c3        (no c is negative)

The products of a step grow with its tokens, attention with the positions that they see, the output projection with the rows that sample,
and reading the weights takes the same time for any step. Least squares of the relative error with exponential forgetting (Ljung 1999,
"System Identification", ch. 11), kept as normal equations and solved by coordinate descent from the last solution (Wright 2015, "Coordinate
descent algorithms", Mathematical Programming 151). So no coefficient becomes negative, one that the recent steps say nothing about stays,
and of the very first step all time is put down to its tokens.

A `PromptBudget` is a bound in tokens and, where steps are bounded in time, one in seconds; it has no state beyond the step that is being planned.
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

    @property
    def shared_step_s(self) -> float:
        """How long what is in flight may take if several tenants are present."""
        fixed_s = self.seconds(StepWork(0, 0.0, 0))
        return min(ALONE_STEP_S, max(SHARED_STEP_S, LEAST_FIXED * fixed_s))

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


LEAST_TOKENS = 16
"""A step with prompts computes at least so many of their tokens, however long it takes, so that they progress. They are cut at multiples of it."""

LEAST_SHARE = 0.25
"""Prompts may use this share of the time, even if decode rows need more than the rest."""

TOKENS_PER_ROW = 5
"""Where nobody has asked for a bound in time, prompts get so many tokens for each decode row, if the step takes at most `LONGEST_MIXED` times the
default then. Prompts that are two to three times as long as their answers bring half as many for each row and step, so that most steps have none:
the median time between tokens is that of decoding. On machines too slow for that the default is kept."""

LONGEST_MIXED = 1.25
"""The longest times between tokens grow by so much at most for the sake of their median."""

GROWTH = 2
"""Until larger steps have been timed, a step that streams wait for has at most this many times the tokens of the largest one (a slow start, as of
TCP)."""

GROWTH_ALONE = 4
"""The same of a step that no stream waits for. A step of a few tokens tells more than each of them costs, so the bound in time holds, too."""

SHORTER_SHARE = 0.75
"""Of a step that the first prompt would fill, so much goes to shorter ones of the same key: they take at most about twice as long as alone."""

SHORTER_SHARE_OF_OTHERS = 0.5
"""The same if they are of other keys, so that no key gets more than its share."""

ALONE_STEP_S = 0.8
"""How long what is in flight may take if no stream waits for it, but requests that are about to arrive: with a step of their own, and what is
predicted wrongly, their first token comes within 1.2 s."""


SHARED_STEP_S = 0.1
LEAST_FIXED = 10
"""The same where several tenants are present, any of whom may send something small next, also if streams wait: but so many times as long as a step of
no tokens takes, so that most of the time is left for tokens, and twice as long as the streams take alone, so that prompts go on."""

LEAST_AWAITED_S = 0.03
LEAST_LEAD_S = 0.006
LEAD = 0.1
"""Where several tenants are present and a step takes so long, the next one is planned so many seconds, or such a part of it, before it should end:
planning takes a few milliseconds, and steps end somewhat earlier than expected."""


class PromptBudget:
    """What prompts may use of the step that is being planned, and what they have taken. cost: tells how long tokens take.

    ending_s: once a prompt ends in the step, its first token waits for the rest of it: the others may make the step so long, or twice as long as it
    is without them, if that is more.
    """

    def __init__(self, tokens: int, cost: StepCost, seconds: float = math.inf, ending_s: float = math.inf) -> None:
        self._tokens = tokens
        self._seconds = seconds
        self._ending_s = ending_s
        self._cost = cost
        self.num_taken = 0
        self._seconds_taken = 0.0
        self._ends = False

    @classmethod
    def beside(
        cls, decoding: StepWork, tokens: int, cost: StepCost, max_step_s: float, longest_s: float = 0.0
    ) -> "PromptBudget":
        """The budget of a step that also computes the decode rows `decoding`, which should take at most `max_step_s`, or `longest_s` for the
        sake of `TOKENS_PER_ROW`."""
        decoding_s = cost.seconds(decoding)
        wanted_s = cost.prompt_seconds(0, TOKENS_PER_ROW * decoding.tokens)
        seconds = max(max_step_s - decoding_s, LEAST_SHARE * max_step_s)
        if decoding_s + wanted_s <= longest_s:
            seconds = max(seconds, wanted_s)
        familiar = GROWTH * cost.most_tokens - decoding.tokens
        return cls(min(tokens, max(familiar, LEAST_TOKENS)), cost, seconds)

    @classmethod
    def alone(cls, tokens: int, cost: StepCost, seconds: float, max_step_s: float) -> "PromptBudget":
        """The budget of a step without decode rows, which should take at most `seconds`, or `max_step_s` beyond what ends in it."""
        fixed_s = cost.seconds(StepWork(0, 0.0, 0))
        seconds = max(seconds - fixed_s, LEAST_SHARE * seconds)
        familiar = max(GROWTH_ALONE * cost.most_tokens, LEAST_TOKENS)
        return cls(min(tokens, familiar), cost, seconds, max_step_s - fixed_s)

    def part_of_shorter(self, share: float, step: int) -> "PromptBudget":
        """What prompts that pass others get: `share` of what is left, or, if that is too little for two, all of it in every other step."""
        tokens, seconds = self._tokens - self.num_taken, self._seconds - self._seconds_taken
        if self._cost.prompt_tokens(0, seconds * (1 - share)) < LEAST_TOKENS:
            share = step % 2
        return PromptBudget(int(tokens * share), self._cost, seconds * share, self._ending_s)

    def rest_of(self, whole: "PromptBudget") -> "PromptBudget":
        """What `whole` leaves to the others."""
        seconds = whole._seconds - whole._seconds_taken
        left = seconds - self._seconds if seconds < math.inf else seconds
        return PromptBudget(whole._tokens - whole.num_taken - self._tokens, self._cost, left, self._ending_s)

    @property
    def is_spent(self) -> bool:
        return self.num_taken >= self._tokens or self._seconds_taken >= self._seconds

    def allows(self, start: int, num_wanted: int) -> int:
        """How many of `num_wanted` prompt tokens from position `start` on may be computed; 0 if the budget is spent."""
        if self.is_spent:
            return 0
        count = min(num_wanted, self._tokens - self.num_taken)
        in_time = self._cost.prompt_tokens(start, self._seconds - self._seconds_taken)
        if in_time < count:
            least = 0 if self.num_taken else LEAST_TOKENS
            count = min(count, max(least, int(in_time) // LEAST_TOKENS * LEAST_TOKENS))
        return count

    def take(self, start: int, count: int, *, ends: bool = False) -> None:
        """`count` prompt tokens from position `start` on will be computed. ends: they give the request its next token."""
        self._take(count, self._cost.prompt_seconds(start, count, int(ends)), ends)

    def take_all_of(self, part: "PromptBudget") -> None:
        """What was taken of `part` is taken of this one."""
        self._take(part.num_taken, part._seconds_taken, part._ends)

    def _take(self, count: int, seconds: float, ends: bool) -> None:
        self.num_taken += count
        self._seconds_taken += seconds
        self._ends |= ends
        if self._ends:
            self._seconds = min(self._seconds, max(self._ending_s, 2 * self._seconds_taken))
