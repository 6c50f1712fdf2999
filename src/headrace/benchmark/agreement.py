"""How close the outputs of a class of precision come to those of float32: greedy tokens, logprobs, perplexity.

Owns the prompts and the arithmetic. Generates nothing: quality.py does for an Engine, `bench/compare` for servers.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.benchmark.workloads import TokenIds

NUM_TOKENS = 32
"""Tokens generated for each prompt, whatever they are: the end of the sequence is ignored."""

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at",
    "Once upon a time there was a little",
    "The three primary colours are",
    "To bake bread you need",
    "The largest planet of the solar system",
    "In 1969, the first people",
    "import os\n\nfor name in os.listdir(",
    "The opposite of hot is",
    "Photosynthesis is the process by which",
    "A list in Python is",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondrion is",
    "SELECT name, age FROM",
    "If it rains tomorrow, we",
    "The best way to learn a language is",
    "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
    "William Shakespeare was born in",
    "The cat sat on the mat and",
    "Roses are red, violets are",
    "The speed of light in vacuum is",
    "Question: Why is the sky blue?\nAnswer:",
    "To be, or not to be, that is",
    "An operating system is a program that",
)


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy continuations, one of each prompt. logprobs: of the first tokens of each, as far as they are known, in nats."""

    ids: list[TokenIds]
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy continuations against those of float32.

    identical: of num_prompts. mean_tokens: before the first that differs, of num_tokens. logprob_difference: mean |difference| in nats over
    those tokens, None if there are none with logprobs.
    """

    num_prompts: int
    identical: int
    num_tokens: int
    mean_tokens: float
    logprob_difference: float | None

    def __str__(self) -> str:
        said = f"{self.identical} of {self.num_prompts} identical, {self.mean_tokens:.1f} of {self.num_tokens} tokens"
        return said if self.logprob_difference is None else f"{said}, |dlogprob| {self.logprob_difference:.4f}"


def agreement(reference: Greedy, got: Greedy) -> Agreement:
    """Compare continuations of the same prompts, in the same order. ValueError unless there are equally many, and at least one."""
    equal = [_common(want, have) for want, have in zip(reference.ids, got.ids, strict=True)]
    if not equal:
        raise ValueError("no continuations to compare")
    differences = [
        abs(want - have)
        for number, length in enumerate(equal)
        if reference.logprobs and got.logprobs
        for want, have in zip(reference.logprobs[number][:length], got.logprobs[number][:length], strict=False)
    ]
    longest = [max(len(want), len(have)) for want, have in zip(reference.ids, got.ids, strict=True)]
    return Agreement(
        num_prompts=len(equal),
        identical=sum(length == full for length, full in zip(equal, longest, strict=True)),
        num_tokens=max(longest),
        mean_tokens=sum(equal) / len(equal),
        logprob_difference=sum(differences) / len(differences) if differences else None,
    )


def _common(want: TokenIds, have: TokenIds) -> int:
    """The number of tokens before the first one that differs."""
    both = min(len(want), len(have))
    return next((index for index in range(both) if want[index] != have[index]), both)


def perplexity(logprobs: Sequence[float]) -> float:
    """e^(mean negative logprob)."""
    return math.exp(-sum(logprobs) / len(logprobs))


def mean_difference(reference: Sequence[float], got: Sequence[float]) -> float:
    """Mean |difference| of the logprobs of the same tokens, in nats."""
    return sum(abs(want - have) for want, have in zip(reference, got, strict=True)) / len(reference)


def increase_error(reference: Sequence[float], got: Sequence[float], window: int) -> float | None:
    """Standard error of the relative increase of the perplexity, as far as another text of the same kind would give another one.

    The logprobs are those of texts with `window` tokens each, which are taken to be independent; None if there is only one.
    """
    differences = [want - have for want, have in zip(reference, got, strict=True)]
    means = [statistics.fmean(differences[start : start + window]) for start in range(0, len(differences), window)]
    return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
