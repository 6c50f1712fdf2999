"""How much of the pool admitted requests are expected to need: the estimate that adapts.

A request may make max_new_tokens outputs but rarely does. Reserving `ratio` of them admits more requests; when the guess was too
low the planner must retract, and the ratio jumps up, else it sinks a little with every step (as SGLang's new_token_ratio does).
"""

import math
from collections.abc import Iterable

from headrace.scheduler.request import Req

INITIAL_RATIO = 0.7
MINIMUM_RATIO = 0.1
DECAY_STEPS = 600
MAX_RESERVED_OUTPUTS = 4096
"""No more outputs than this are reserved for one request: it may ask for the whole context and stop after a line."""

RETRACT_MARGIN_TOKENS = 20


class NewTokenRatio:
    """The share of the outputs still allowed that is reserved for each admitted request."""

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(1.0, INITIAL_RATIO * conservativeness)
        self._minimum = min(self._initial, MINIMUM_RATIO * conservativeness)
        self._decay = (self._initial - self._minimum) / DECAY_STEPS
        self.value = self._initial

    def step(self) -> None:
        """A step went well."""
        self.value = max(self._minimum, self.value - self._decay)

    def retracted(self, left: Iterable[Req]) -> None:
        """Requests had to go; `left` stay. Reserve what these have used of what they asked for, and a margin."""
        asked = made = 0
        for req in left:
            asked += req.asked.sampling.max_new_tokens
            made += req.num_outputs + RETRACT_MARGIN_TOKENS
        self.value = max(self.value, min(1.0, made / max(1, asked)))

    def reset(self) -> None:
        """The engine is idle: start over."""
        self.value = self._initial

    def reserve(self, req: Req) -> int:
        """Tokens to keep for the request's outputs."""
        left = min(max(0, req.num_new_tokens_left), MAX_RESERVED_OUTPUTS)
        return math.ceil(left * self.value)
