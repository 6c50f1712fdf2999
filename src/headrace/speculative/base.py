"""What guesses tokens, and the guesses of a step. Runs in the worker's thread, after a step has sampled and before the next one computes."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.messages.step import MOST_VERIFIED, Int32Array, ModelWorkerBatch, NewSequence
from headrace.speculative.pace import USUAL, worthwhile


class Guess(NamedTuple):
    """Tokens that may come next; a promise of as many, with any values, if the drafter finds them in `begin`. chance: that one of them is right, if
    all before it are."""

    tokens: list[int]
    chance: float


NOTHING = Guess([], 0.0)


def can_guess(new: NewSequence) -> bool:
    """Embeddings are no tokens to guess by, and hidden states are asked for token by token."""
    return new.content.has_tokens and not new.task.reads_all


class Drafter(Protocol):
    """Guesses the next tokens of sequences, each of which has a row in the worker's tables."""

    def add(self, new: NewSequence) -> None:
        """A sequence enters row `new.seq`, which is free."""

    def extend(self, seq: int, ids: Sequence[int]) -> None:
        """The next tokens of the sequence: all that a step has sampled for it."""

    def guess(self, seq: int) -> Guess:
        """What may follow the last token of the sequence."""

    def begin(self, plan: ModelWorkerBatch) -> None:
        """A step begins, with as many of the guesses as it was worth. Promised tokens are written to the token buffer now."""
        return

    def follow(self, plan: ModelWorkerBatch) -> None:
        """A step has sampled, or on a device all of that is queued; its ids are in the token buffer. Nothing of a later step has begun."""
        return

    def end(self, plan: ModelWorkerBatch, kept: Int32Array) -> None:
        """A step ends; sequences have been extended, and guesses are asked for next. On a device the next step may have been queued.

        kept: how many tokens of each row stay: without wrong drafts, and without the last known token of a row that was to sample and did not.
        """
        return

    def leave(self, seq: int) -> None:
        """The sequence in row `seq` is in no later step."""


class Drafts:
    """The drafters of a worker. Where several have a guess, the first of them is heard. times: of the model's steps. pass_time: see `worthwhile`."""

    def __init__(self, drafters: Sequence[Drafter], pass_time: float = 0.0) -> None:
        self._drafters = drafters
        self.times = USUAL
        self._pass_time = pass_time
        self._silent: set[int] = set()

    def add(self, new: NewSequence) -> None:
        if can_guess(new):
            self._silent.discard(new.seq)
        else:
            self._silent.add(new.seq)
        for drafter in self._drafters:
            drafter.add(new)

    def extend(self, seq: int, ids: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.extend(seq, ids)

    def begin(self, plan: ModelWorkerBatch) -> None:
        for drafter in self._drafters:
            drafter.begin(plan)

    def follow(self, plan: ModelWorkerBatch) -> None:
        for drafter in self._drafters:
            drafter.follow(plan)

    def end(self, plan: ModelWorkerBatch, kept: Int32Array) -> None:
        for drafter in self._drafters:
            drafter.end(plan, kept)

    def leave(self, seq: int) -> None:
        for drafter in self._drafters:
            drafter.leave(seq)

    def propose(self, seqs: Sequence[int]) -> list[list[int]]:
        """What the next step should compute after the last token of each sequence; empty where no guess is worth its cost.

        seqs: all that the step has sampled.
        """
        most = MOST_VERIFIED // max(1, len(seqs)) - 1  # as many as the scheduler lets each row compute
        guesses = [self._guess(seq) for seq in seqs] if most > 0 else []
        if not any(guess.tokens for guess in guesses):
            return [[]] * len(seqs)
        counts = [min(len(guess.tokens), most) for guess in guesses]
        lengths = worthwhile([guess.chance for guess in guesses], counts, self.times, self._pass_time)
        return [guess.tokens[:length] for guess, length in zip(guesses, lengths, strict=True)]

    def _guess(self, seq: int) -> Guess:
        if seq in self._silent:
            return NOTHING
        for drafter in self._drafters:
            guess = drafter.guess(seq)
            if guess.tokens:
                return guess
        return NOTHING
