"""How many tokens are worth guessing, by how often the last guesses were right, also those that no step computed.

A drafter always has a guess in mind, and is right or wrong about the next token whether a step computes the guess or not. So each sequence has a
chance that its next guess is right, and k guesses in a row give p + p^2 + ... + p^k tokens more. They lengthen the step, which takes

    1 + TOKEN max(0, tokens - HIDDEN)        in steps of one token: a step's time goes to reading the weights, and a few tokens hide in it
    + WAIT                                   if anything is guessed: the step after it cannot be planned before it has ended

Guesses are added from the best to the worst as long as the tokens of a step grow faster than its time. A model that guesses token by token takes
time, too: a pass for the next token of all rows.
"""

from collections.abc import Sequence

HIDDEN = 8
"""For SmolLM2 on two cores 4 in int4, 9 in int8 and 12 in bf16, about: up to so many a step is at most a fifth longer."""
TOKEN = 0.06
"""Of each token more, up to 16: 0.055 to 0.085."""
WAIT = 0.05
"""0.2 to 0.3 ms of 5 to 6."""

FIRST_CHANCE = 0.5
_MEMORY = 0.85
"""Weight of all earlier guesses when the next one turns out right or wrong: the last seven count most."""


def learnt(chance: float, is_right: bool) -> float:
    """The chance of a sequence, after a guess has turned out right or wrong. Guesses after a wrong one say nothing."""
    return _MEMORY * chance + (1.0 - _MEMORY) * is_right


def learnt_from(chance: float, ids: Sequence[int], guessed: Sequence[int]) -> float:
    """The chance of a sequence, after these ids have come in place of those that were guessed."""
    for token_id, guess in zip(ids, guessed, strict=False):
        chance = learnt(chance, token_id == guess)
        if token_id != guess:
            break
    return chance


def worthwhile(chances: Sequence[float], guessed: Sequence[int], pass_time: float = 0.0) -> list[int]:
    """How many of the guessed[i] tokens of each row of a step to compute in the next one. All zero if nothing pays.

    chances: of the rows. pass_time: what it takes to guess one more token after those of all rows, where a model guesses; in steps of one token.
    """
    num_rows = len(chances)
    best, best_rate = [0] * num_rows, num_rows / _time(num_rows)
    most = max(guessed)
    for deepest in range(1, most + 1) if pass_time else (most,):
        of_rows = [min(count, deepest) for count in guessed]
        lengths, rate = _filled(chances, of_rows, WAIT + deepest * pass_time)
        if rate > best_rate:
            best, best_rate = lengths, rate
    return best


def _time(num_tokens: int) -> float:
    """Of a step, see the module."""
    return 1.0 + TOKEN * max(0, num_tokens - HIDDEN)


def _filled(chances: Sequence[float], guessed: Sequence[int], more_time: float) -> tuple[list[int], float]:
    """The number of each row's guesses with which a step gives the most tokens in its time, and how many that are. more_time: beside its tokens."""
    computed, tokens = len(chances), float(len(chances))
    lengths = [0] * len(chances)
    time = _time(computed) + more_time
    gains = ((chance**place, row) for row, chance in enumerate(chances) for place in range(1, guessed[row] + 1))
    for gain, row in sorted(gains, reverse=True):
        longer = _time(computed + 1) + more_time
        if gain * time <= (longer - time) * tokens:
            break
        computed, tokens, time = computed + 1, tokens + gain, longer
        lengths[row] += 1
    return lengths, tokens / time
