"""Guesses by grammar: text that must come next, such as a key of a JSON schema and the punctuation around it.

Whoever fills the mask of a token also finds out which tokens would spell what the grammar then demands. The first of them has been sampled when they
are guessed; that the model spells it in another way is possible, so they are guesses like all others.
"""

from collections.abc import Callable, Sequence

from headrace.messages.step import NewSequence
from headrace.speculative.base import NOTHING, Drafter, Guess
from headrace.speculative.pace import learnt_from

_FIRST_CHANCE = 0.9


class ForcedDrafter(Drafter):
    """demanded: the tokens that the grammar of a sequence demanded from its last sampled token on; empty if it left a choice there.

    most: tokens that are guessed at a time.
    """

    def __init__(self, demanded: Callable[[int], list[int]], most: int) -> None:
        self._demanded = demanded
        self._most = most
        self._chances: dict[int, float] = {}
        self._guesses: dict[int, list[int]] = {}

    def add(self, new: NewSequence) -> None:
        self._chances[new.seq] = _FIRST_CHANCE

    def leave(self, seq: int) -> None:
        self._guesses.pop(seq, None)
        self._chances.pop(seq, None)

    def extend(self, seq: int, ids: Sequence[int]) -> None:
        if seq not in self._chances:  # it has left, and a step that was planned before samples it
            return
        self._chances[seq] = learnt_from(self._chances[seq], ids, self._guesses.pop(seq, ()))
        demanded = self._demanded(seq)
        if len(demanded) > 1 and demanded[0] == ids[-1]:
            self._guesses[seq] = demanded[1 : 1 + self._most]

    def guess(self, seq: int) -> Guess:
        tokens = self._guesses.get(seq)
        return Guess(tokens, self._chances[seq]) if tokens else NOTHING
