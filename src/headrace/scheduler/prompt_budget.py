"""How many prompt tokens a step may compute: a bound in tokens and, where steps are bounded in time, one in seconds.

Owns no state beyond the step that is being planned. Runs in the scheduler's thread.
"""

import math

from headrace.scheduler.step_cost import StepCost, StepWork

LEAST_TOKENS = 16
"""A step with prompts computes at least so many of their tokens, however long it takes, so that they progress. They are cut at multiples of it."""

LEAST_SHARE = 0.25
"""Prompts may use this share of the time, even if decode rows need more than the rest."""

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
    def beside(cls, decoding: StepWork, tokens: int, cost: StepCost, max_step_s: float) -> "PromptBudget":
        """The budget of a step that also computes the decode rows `decoding`, which should take at most `max_step_s`."""
        seconds = max(max_step_s - cost.seconds(decoding), LEAST_SHARE * max_step_s)
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
        """Whether no prompt may be computed any more."""
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
