"""How much of the pool admitted requests are expected to need: two estimates that adapt.

A request may make max_new_tokens outputs but rarely does: a chat asks for the whole context and stops after a line. `UsualLength` learns
how long outputs are. Of what a request is then expected to make, `NewTokenRatio` reserves a share. It sinks a little with every
step; when it was too low the planner must retract, and it jumps up (as SGLang's new_token_ratio does).
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
"""From wherever it is, the ratio sinks to its minimum in this many steps."""
RETRACT_MARGIN_TOKENS = 20

DEFAULT_CLIP_TOKENS = 4096
USUAL_QUANTILE = 0.75
FIRST_GUESS_TOKENS = 512
FIRST_GUESSES = 8
"""The first guess counts as much as this many outputs that ended."""
MAX_LENGTHS = 256


class UsualLength:
    """A quantile of the lengths of the outputs that ended lately. `tokens`: three of four were no longer."""

    def __init__(self) -> None:
        self._lately = deque([FIRST_GUESS_TOKENS] * FIRST_GUESSES)
        self._sorted = list(self._lately)
        self.tokens = FIRST_GUESS_TOKENS

    def learn(self, req: Req, finish: FinishReason) -> None:
        """`req` ended so. One that was cut off says nothing, unless it was longer than usual already."""
        length = req.num_outputs
        if req.task.params.ignore_eos or finish.type == "abort":
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

        One that ignores EOS makes all it may. One that has outlived the usual length is expected to go on for as long again.
        """
        left = max(0, req.num_new_tokens_left)
        if req.task.params.ignore_eos:
            return left
        return min(left, max(self.tokens - req.num_outputs, req.num_outputs, RETRACT_MARGIN_TOKENS))


class NewTokenRatio:
    """The share of the outputs still expected that is reserved for each admitted request.

    conservativeness: factor on that share. clip_tokens: no more outputs than this are expected of one request.
    """

    def __init__(self, conservativeness: float, clip_tokens: int = DEFAULT_CLIP_TOKENS) -> None:
        self._clip_tokens = clip_tokens
        self.usual = UsualLength()
        self.value = self._decay = 0.0
        self.scale(conservativeness)

    def scale(self, conservativeness: float) -> None:
        """Begin anew with another factor. What is usual is still known."""
        self._conservativeness = conservativeness
        self._initial = min(1.0, INITIAL_RATIO * conservativeness)
        self._minimum = min(self._initial, MINIMUM_RATIO * conservativeness)
        self._set(self._initial)

    def step(self) -> None:
        """A step went well."""
        self.value = max(self._minimum, self.value - self._decay)

    def retracted(self, left: Iterable[Req]) -> None:
        """Requests had to go; `left` stay. Reserve the share that these have made of what they were expected to make, and a margin."""
        expected = made = margin = 0
        for req in left:
            expected += req.num_outputs + self._expected_left(req)
            made += req.num_outputs
            margin += RETRACT_MARGIN_TOKENS
        # The margin is not scaled: without it a small factor would take the next request back at once.
        wanted = min(1.0, (min(1.0, self._conservativeness) * made + margin) / max(1, expected))
        if wanted > self.value:
            self._set(wanted)

    def reset(self) -> None:
        """The engine is idle: start over. What is usual is still known."""
        self._set(self._initial)

    def reserve(self, req: Req) -> int:
        """Tokens to keep for the request's outputs."""
        return math.ceil(self._expected_left(req) * self.value)

    def expected_tokens(self, req: Req, page_size: int) -> int:
        """Tokens of pages that the request will still take: the rest of its known tokens and the outputs reserved for it."""
        known = max(0, req.num_tokens - req.num_scheduled)
        in_last_page = len(req.pages) * page_size - req.num_scheduled if req.pages else 0
        return max(0, known + self.reserve(req) - max(0, in_last_page)) + page_size - 1

    def _expected_left(self, req: Req) -> int:
        return min(self.usual.expected_left(req), self._clip_tokens)

    def _set(self, value: float) -> None:
        self.value = value
        self._decay = (value - self._minimum) / DECAY_STEPS
