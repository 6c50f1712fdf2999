"""How many drafts are worth their time: what steps cost is measured, what a draft is worth is learnt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.messages.step import MOST_VERIFIED
from headrace.speculative.pace import FIRST_CHANCE, USUAL, WAIT_S, StepTimes, learnt, worthwhile

FLAT = StepTimes.measured({1: 0.010, 4: 0.010, 16: 0.011})
STEEP = StepTimes.measured({1: 0.0046, 4: 0.0092, 16: 0.0276})
"""4 bits on AVX2."""
STEPPED = StepTimes.measured({1: 0.006, 2: 0.0075, 8: 0.0075, 16: 0.013})
"""The second token costs most, those after it nothing."""


def rate(chances: list[float], lengths: list[int], times: StepTimes) -> float:
    """Tokens of a step over its time."""
    tokens = sum(1 + sum(chance**k for k in range(1, n + 1)) for chance, n in zip(chances, lengths, strict=True))
    guesses = sum(lengths)
    return tokens / (times.by_tokens[len(chances) + guesses] + times.wait * bool(guesses))


@given(
    rows=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6)), min_size=1, max_size=4),
    other=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    times=st.sampled_from([USUAL, FLAT, STEEP, STEPPED]),
)
def test_no_other_lengths_give_more_tokens_in_the_time(rows, other, times):
    chances, guessed = [chance for chance, _ in rows], [count for _, count in rows]
    lengths = worthwhile(chances, guessed, times)

    assert all(0 <= length <= most for length, most in zip(lengths, guessed, strict=True))
    others = [min(length, most) for length, most in zip(other, guessed, strict=False)]
    alone = rate(chances, [0] * len(chances), times)
    if any(lengths):
        assert rate(chances, lengths, times) >= rate(chances, others, times) - 1e-9
        assert rate(chances, lengths, times) > 1.05 * alone
    else:
        assert rate(chances, others, times) <= 1.05 * alone + 1e-9


def test_many_rows_leave_no_time_for_guesses_that_are_often_wrong():
    assert worthwhile([0.6], [4]) != [0]
    assert worthwhile([0.6] * 32, [4] * 32) == [0] * 32
    assert sum(worthwhile([1.0] * 32, [4] * 32)) > 0


def test_a_guess_must_be_the_likelier_the_more_a_token_costs():
    assert worthwhile([0.2], [2], FLAT) == [2]
    assert worthwhile([0.2], [2], STEEP) == [0]
    assert worthwhile([0.95], [4], STEEP) == [4]
    assert worthwhile([0.3] * 8, [4] * 8, STEEP) == [0] * 8


def test_times_lie_between_those_that_were_measured_and_grow_on_after_them():
    times = StepTimes.measured({1: 0.010, 4: 0.013, 16: 0.025})

    assert times.by_tokens[1:6] == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4])
    assert times.by_tokens[MOST_VERIFIED] == pytest.approx(1 + 0.1 * (MOST_VERIFIED - 1))
    assert times.wait == pytest.approx(WAIT_S / 0.010)


def test_a_step_that_was_delayed_counts_as_no_longer_than_a_larger_one():
    delayed = StepTimes.measured({1: 0.010, 4: 0.030, 16: 0.025})
    assert delayed == StepTimes.measured({1: 0.010, 4: 0.025, 16: 0.025})
    assert StepTimes.measured({1: 0.010, 16: 0.008}).by_tokens[16] == 1.0


def test_drafts_do_not_pay_where_a_token_more_takes_as_long_as_a_step():
    assert USUAL.pays
    assert STEEP.pays
    assert not StepTimes.measured({1: 0.010, 4: 0.040, 16: 0.160}).pays


def test_a_chance_follows_the_last_guesses():
    chance = FIRST_CHANCE
    for _ in range(20):
        chance = learnt(chance, True)
    assert chance > 0.97
    for _ in range(20):
        chance = learnt(chance, False)
    assert chance < 0.05
