"""What a fleet is asked: sessions of several turns that begin with one of a few system prompts. The same for the same seed.

Owns what is said and when sessions begin. A next turn begins some time after the answer to the last one, so when it does is the simulation's.
Requests are made when they are sent: a million of them need no memory before that.
"""

import random
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

from bench.fleet.options import WorkloadOptions, most
from headrace.messages.requests import PromptContent, SampleTask, TokenizedGenerateReqInput
from headrace.sampling.params import ResolvedSamplingParams


class Session:
    """One user's conversation. history: all tokens so far, system prompt included."""

    __slots__ = ("_options", "_random", "_turn", "history", "number", "turns_left")

    def __init__(
        self, number: int, turns: int, history: "array[int]", rng: random.Random, options: WorkloadOptions
    ) -> None:
        self.number = number
        self.turns_left = turns
        self.history = history
        self._random = rng
        self._options = options
        self._turn = 0

    def next_request(self) -> TokenizedGenerateReqInput:
        """The next turn. There is one."""
        assert self.turns_left > 0, self.number
        options = self._options
        self.turns_left -= 1
        self._turn += 1
        self.history += _text(self._random, _length(self._random, options.turn_tokens), options.vocab_size)
        rid, num_tokens = f"{self.number}.{self._turn}", _length(self._random, options.output_tokens)
        return TokenizedGenerateReqInput(rid, PromptContent(self.history.tobytes()), _task(num_tokens))

    def answered(self, answer: "array[int]") -> float:
        """The answer to the last request has come. Returns the seconds until the next turn, if there is one."""
        self.history += answer
        return self._random.expovariate(1 / self._options.think_s) if self._options.think_s else 0.0


class Workload:
    """The sessions of a run. num_requests: in all their turns. rate: requests per second, over all replicas."""

    def __init__(self, options: WorkloadOptions, num_requests: int, rate: float, seed: int) -> None:
        self.num_requests = num_requests
        self.rate = rate
        self._options = options
        self._seed = seed
        self._weights = list(accumulate(1 / (k + 1) ** options.zipf for k in range(options.groups)))
        self._system_prompts: dict[int, array[int]] = {}

    def sessions(self) -> Iterator[tuple[float, Session]]:
        """When each session begins, and the session, in order: a Poisson process."""
        arrivals = random.Random(f"{self._seed} arrivals")
        begins_s, num_left, number = 0.0, self.num_requests, 0
        while num_left > 0:
            rng = random.Random(f"{self._seed} session {number}")
            turns = min(num_left, rng.randint(1, 2 * self._options.turns - 1))
            group = bisect_left(self._weights, rng.random() * self._weights[-1])
            yield begins_s, Session(number, turns, self._system_prompt(group)[:], rng, self._options)
            num_left -= turns
            number += 1
            begins_s += arrivals.expovariate(self.rate / self._options.turns)

    def _system_prompt(self, group: int) -> "array[int]":
        if group not in self._system_prompts:
            rng = random.Random(f"{self._seed} system prompt {group}")
            num_tokens = _length(rng, self._options.system_tokens) if self._options.system_tokens else 0
            self._system_prompts[group] = _text(rng, num_tokens, self._options.vocab_size)
        return self._system_prompts[group]


def _length(rng: random.Random, mean: int) -> int:
    return rng.randint(max(1, mean - mean // 2), most(mean))


def _text(rng: random.Random, num_tokens: int, vocab_size: int) -> "array[int]":
    """Random token ids, int32."""
    return array("i", [value % vocab_size for value in array("I", rng.randbytes(4 * num_tokens))])


@lru_cache(maxsize=4096)
def _task(num_tokens: int) -> SampleTask:
    return SampleTask(ResolvedSamplingParams(max_new_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True))
