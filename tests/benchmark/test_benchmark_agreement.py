"""What is said of outputs that are compared with those of float32."""

import math

import pytest

from headrace.benchmark.agreement import Agreement, Greedy, agreement, increase_error, mean_difference, perplexity


def test_tokens_count_up_to_the_first_that_differs_and_logprobs_with_them():
    reference = Greedy([[1, 2, 3, 4], [5, 6, 7, 8]], [[-0.5, -1.0, -1.5, -2.0]] * 2)
    got = Greedy([[1, 2, 3, 4], [5, 9, 7, 8]], [[-0.5, -1.0, -1.5, -2.5], [-1.0, -9.0, -9.0, -9.0]])

    assert agreement(reference, got) == Agreement(2, 1, 4, 2.5, (0.5 + 0.5) / 5)


def test_logprobs_count_as_far_as_they_are_known():
    assert agreement(Greedy([[1, 2]], [[-1.0, -1.0]]), Greedy([[1, 2]], [[-1.5]])).logprob_difference == 0.5


def test_a_shorter_output_is_not_identical():
    assert agreement(Greedy([[1, 2, 3]], []), Greedy([[1, 2]], [])) == Agreement(1, 0, 3, 2.0, None)


@pytest.mark.parametrize("got", [[[7, 2]], []])
def test_there_may_be_nothing_to_take_logprobs_of(got: list[list[int]]):
    logprobs = [[-1.0, -1.0]] if got else []
    reference = Greedy([[1, 2]] if got else [], logprobs)
    if got:
        assert agreement(reference, Greedy(got, logprobs)).logprob_difference is None
    else:
        with pytest.raises(ValueError, match="no continuations"):
            agreement(reference, Greedy(got, logprobs))


def test_as_many_outputs_are_expected_as_there_are_references():
    with pytest.raises(ValueError, match="zip"):
        agreement(Greedy([[1], [2]], []), Greedy([[1]], []))


def test_perplexity_and_difference_are_means_in_nats():
    assert perplexity([-math.log(2), -math.log(8)]) == pytest.approx(4)
    assert mean_difference([-1.0, -2.0], [-1.5, -1.0]) == 0.75


def test_the_error_of_an_increase_comes_from_how_much_texts_differ():
    reference, got = [-1.0] * 6, [-1.0, -1.0, -1.5, -2.5, -3.0, -3.0]  # means of the differences: 0, 1, 2

    assert increase_error(reference, got, 2) == pytest.approx(1 / math.sqrt(3))
    assert increase_error(reference, got, 6) is None
