"""How close the outputs of a class of precision come to those of float32: greedy tokens, logprobs, perplexity.

Owns the prompts, the text that perplexities are measured on and weights are calibrated on, and the arithmetic. Generates nothing: quality.py does for
an Engine, `bench/compare` for servers.
"""

import math
import pydoc_data.topics
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.benchmark.workloads import TokenIds
from headrace.text.tokenizers import Tokenizer

WINDOW = 512
"""Tokens that a perplexity sees at a time."""

_HELD_OUT_EVERY = 4

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
    equal = [common_length(want, have) for want, have in zip(reference.ids, got.ids, strict=True)]
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


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common beginning."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


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


def default_text(part: Literal["calibration", "held out"]) -> str:
    """One part of Python's own reference, the topics of `help()`, which every machine has; they share no topic.

    Another Python version has a slightly different text.
    """
    topics = pydoc_data.topics.topics
    return "\n\n".join(
        topics[name]
        for index, name in enumerate(sorted(topics))
        if (index % _HELD_OUT_EVERY == 0) == (part == "held out")
    )


def windows_of(tokenizer: Tokenizer, text: str, max_tokens: int) -> list[list[int]]:
    """The text's first `max_tokens` tokens in windows of 512, the last one dropped when it is short, unless it is the only one."""
    ids = tokenizer.encode(text)[:max_tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    return [window for window in windows if len(window) == WINDOW] or windows[:1]
