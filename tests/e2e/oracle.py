"""Drafts that know the answers of an engine without guesses: what is seen of guessing does not depend on what a model says."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from engines import running_engine

from headrace.api.engine import Engine
from headrace.execution import build
from headrace.messages.step import Int32Array, ModelWorkerBatch, NewSequence

Key = tuple[tuple[int, ...], int, int]
"""Prompt, adapter, seed (0 = greedy)."""


@dataclass(slots=True)
class Answers:
    """The outputs of each request so far. num_guessed, num_rows: tokens guessed from them, and sequences that were added while they were.

    permits: a step takes one before it guesses; None = it need not.
    """

    ids: dict[Key, list[int]] = field(default_factory=dict)
    num_guessed: int = 0
    num_rows: int = 0
    permits: threading.Semaphore | None = None


class Noted:
    """`Drafts` that guess nothing, and note the answers.

    A sequence that enters a row which none has left, or leaves one where there is none, fails its step.
    """

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.rows: dict[int, tuple[Key, int]] = {}

    def add(self, new: NewSequence) -> None:
        assert new.seq not in self.rows, new.seq
        prompt, outputs = new.token_ids[: new.num_prompt_tokens].tolist(), new.token_ids[new.num_prompt_tokens :]
        params = new.task.params
        self.rows[new.seq] = (tuple(prompt), new.lora_id, 0 if params.is_greedy else params.seed), len(outputs)

    def extend(self, seq: int, ids: Sequence[int]) -> None:
        key, count = self.rows[seq]
        self.rows[seq] = key, count + len(ids)
        known = self.answers.ids.setdefault(key, [])
        known[count:] = ids

    def begin(self, plan: ModelWorkerBatch) -> None:
        pass

    def follow(self, plan: ModelWorkerBatch) -> None:
        pass

    def end(self, plan: ModelWorkerBatch, kept: Int32Array) -> None:
        pass

    def leave(self, seq: int) -> None:
        del self.rows[seq]

    def propose(self, seqs: Sequence[int]) -> list[list[int]]:
        return [[] for _ in seqs]


class Oracle(Noted):
    """Guesses up to 5 tokens of the answers; of every third guess one is wrong."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._number = 0

    def add(self, new: NewSequence) -> None:
        super().add(new)
        self.answers.num_rows += 1

    def extend(self, seq: int, ids: Sequence[int]) -> None:
        key, count = self.rows[seq]
        self.rows[seq] = key, count + len(ids)

    def propose(self, seqs: Sequence[int]) -> list[list[int]]:
        if self.answers.permits is not None:
            assert self.answers.permits.acquire(timeout=60)
        return [self._guess(*self.rows[seq]) for seq in seqs]

    def _guess(self, key: Key, count: int) -> list[int]:
        self._number += 1
        guess = list(self.answers.ids.get(key, [])[count : count + self._number % 6])
        if guess and self._number % 3 == 0:
            guess[self._number % len(guess)] += 1
        self.answers.num_guessed += len(guess)
        return guess


@contextmanager
def noting(patch: pytest.MonkeyPatch, model: str, **options: Any) -> Iterator[tuple[Engine, Answers]]:
    """An engine that guesses nothing, and its answers as they come."""
    answers = Answers()
    with patch.context() as own:
        own.setattr(build, "make_drafts", lambda *arguments, **named: Noted(answers))
        with running_engine(model, **options) as engine:
            yield engine, answers


@contextmanager
def guessing(patch: pytest.MonkeyPatch, model: str, answers: Answers, **options: Any) -> Iterator[Engine]:
    """An engine that guesses these answers."""
    with patch.context() as own:
        own.setattr(build, "make_drafts", lambda *arguments, **named: Oracle(answers))
        with running_engine(model, speculative_algorithm="ngram", **options) as engine:
            yield engine
