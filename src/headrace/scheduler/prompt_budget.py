"""How many prompt tokens a step may compute: a bound in tokens and, where streams wait for the step, one in time.

Owns no state beyond the step that is being planned. Runs in the scheduler's thread.
"""

import math

from headrace.scheduler.step_cost import StepCost, StepWork

LEAST_TOKENS = 16
"""A step with prompts computes at least so many of their tokens, however long it takes, so that they progress. They are cut at multiples of it."""

LEAST_SHARE = 0.25
"""Prompts may use this share of the time, even if decode rows need more than the rest."""

GROWTH = 2
"""Until larger steps have been timed, a step has at most this many times the tokens of the largest one (a slow start, as of TCP)."""


class PromptBudget:
    """What prompts may use of the step that is being planned, and what they have taken. cost: tells how long tokens take."""

    def __init__(self, tokens: int, cost: StepCost, seconds: float = math.inf) -> None:
        self._tokens = tokens
        self._seconds = seconds
        self._cost = cost
        self.num_taken = 0
        self._seconds_taken = 0.0

    @classmethod
    def beside(cls, decoding: StepWork, tokens: int, cost: StepCost, max_step_s: float) -> "PromptBudget":
        """The budget of a step that also computes the decode rows `decoding`, which should take at most `max_step_s`."""
        seconds = max(max_step_s - cost.seconds(decoding), LEAST_SHARE * max_step_s)
        familiar = GROWTH * cost.most_tokens - decoding.tokens
        return cls(min(tokens, max(familiar, LEAST_TOKENS)), cost, seconds)

    def half(self) -> "PromptBudget":
        """A budget of half of what is left."""
        return PromptBudget((self._tokens - self.num_taken) // 2, self._cost, (self._seconds - self._seconds_taken) / 2)

    @property
    def is_spent(self) -> bool:
        """Whether no prompt may be computed any more."""
        return self.num_taken >= self._tokens or self._seconds_taken >= self._seconds

    def allows(self, start: int, num_wanted: int) -> int:
        """How many of `num_wanted` prompt tokens from position `start` on may be computed; 0 if the budget is spent."""
        if self.is_spent:
            return 0
        count = min(num_wanted, self._tokens - self.num_taken)
        in_time = self._cost.prompt_tokens(start, self._seconds - self._seconds_taken)
        if in_time < count:
            count = min(count, max(LEAST_TOKENS, int(in_time) // LEAST_TOKENS * LEAST_TOKENS))
        return count

    def take(self, start: int, count: int) -> None:
        """`count` prompt tokens from position `start` on will be computed."""
        self.num_taken += count
        self._seconds_taken += self._cost.prompt_seconds(start, count)

    def take_all_of(self, part: "PromptBudget") -> None:
        """What was taken of `part` is taken of this one."""
        self.num_taken += part.num_taken
        self._seconds_taken += part._seconds_taken
