"""Estimates how much of the KV pool admitted requests will need.

A request may generate max_new_tokens but rarely does: a chat allows for the whole context and stops after a line. `UsualLength` learns
how long outputs usually are. `NewTokenRatio` reserves a fraction of the output that is expected of a request. The fraction falls a little
with every step and jumps up when it was too low and requests had to be retracted (like SGLang's new_token_ratio).
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

from headrace.messages.outputs import FinishReason
from headrace.scheduler.request import Req

INITIAL_RATIO = 0.7
MINIMUM_RATIO = 0.1
DECAY_STEPS = 600
"""The ratio falls to its minimum in this many steps."""
RETRACT_MARGIN_TOKENS = 20

DEFAULT_CLIP_TOKENS = 4096
USUAL_QUANTILE = 0.75
FIRST_GUESS_TOKENS = 512
FIRST_GUESSES = 8
"""Weight of the initial guess, in finished outputs."""
MAX_LENGTHS = 256


class UsualLength:
    """A quantile of the lengths of recent outputs. `tokens`: three of four were no longer than this."""

    def __init__(self) -> None:
        self._lately = deque([FIRST_GUESS_TOKENS] * FIRST_GUESSES)
        self._sorted = list(self._lately)
        self.tokens = FIRST_GUESS_TOKENS

    def learn(self, req: Req, finish: FinishReason) -> None:
        """Learn from the length of `req`, which ended with `finish`. One that was cut off counts only if it was already longer than usual."""
        length = req.num_outputs
        if req.task.ignores_eos or finish.type == "abort":
            return
        if finish.type == "length" and length <= self.tokens:
            return
        if len(self._lately) == MAX_LENGTHS:
            del self._sorted[bisect_left(self._sorted, self._lately.popleft())]
        self._lately.append(length)
        insort(self._sorted, length)
        self.tokens = self._sorted[int(USUAL_QUANTILE * (len(self._sorted) - 1))]

    def expected_left(self, req: Req) -> int:
        """Output tokens that the request is still expected to make.

        A request that ignores EOS generates all that it may. One that is longer than usual is expected to get as long again.
        """
        left = max(0, req.num_new_tokens_left)
        if req.task.ignores_eos:
            return left
        return min(left, max(self.tokens - req.num_outputs, req.num_outputs, RETRACT_MARGIN_TOKENS))


class NewTokenRatio:
    """The fraction of the expected output that is reserved for each admitted request.

    conservativeness: factor on that fraction. clip_tokens: most output tokens to reserve for one request.
    """

    def __init__(self, conservativeness: float, clip_tokens: int = DEFAULT_CLIP_TOKENS) -> None:
        self._clip_tokens = clip_tokens
        self.usual = UsualLength()
        self.value = self._decay = 0.0
        self.scale(conservativeness)

    def scale(self, conservativeness: float) -> None:
        """Start over with another factor, keeping the learned length."""
        self._conservativeness = conservativeness
        self._initial = min(1.0, INITIAL_RATIO * conservativeness)
        self._minimum = min(self._initial, MINIMUM_RATIO * conservativeness)
        self._set(self._initial)

    def step(self) -> None:
        """Called after each step that needed no retraction: the ratio falls."""
        self.value = max(self._minimum, self.value - self._decay)

    def retracted(self, left: Iterable[Req]) -> None:
        """Called after a retraction: reserve the fraction of their expected output that the remaining requests have generated, plus a margin."""
        expected = made = margin = 0
        for req in left:
            expected += req.num_outputs + self._expected_left(req)
            made += req.num_outputs
            margin += RETRACT_MARGIN_TOKENS
        # The margin is not scaled: with a small factor, the next request would be retracted at once.
        wanted = min(1.0, (min(1.0, self._conservativeness) * made + margin) / max(1, expected))
        if wanted > self.value:
            self._set(wanted)

    def reset(self) -> None:
        """Start over, keeping the learned length. Called when the engine is idle."""
        self._set(self._initial)

    def reserve(self, req: Req) -> int:
        """Tokens to reserve for the request's output."""
        return math.ceil(self._expected_left(req) * self.value)

    def expected_tokens(self, req: Req, page_size: int, num_cached: int = 0) -> int:
        """Tokens, in whole pages, that the request will still need: the rest of its known tokens and its reserved output.

        num_cached: of a waiting request, the known tokens that the cache has.
        """
        known = max(0, req.num_tokens - req.num_scheduled - num_cached)
        in_last_page = len(req.pages) * page_size - req.num_scheduled if req.pages else 0
        return max(0, known + self.reserve(req) - max(0, in_last_page)) + page_size - 1

    def _expected_left(self, req: Req) -> int:
        return min(self.usual.expected_left(req), self._clip_tokens)

    def _set(self, value: float) -> None:
        self.value = value
        self._decay = (value - self._minimum) / DECAY_STEPS
