"""Guessed tokens: a step computes several of them, and which are right is known when it ends."""

import pytest
from fake_worker import Rig, expected_outputs

from headrace.messages.control import AbortReq
from headrace.messages.step import MOST_VERIFIED

PROMPT = [0, 1, 1, 0, 1]
NEVER = 1_000_000
"""EOS so rarely that no test sees it."""


def steps_of(rig: Rig) -> list[tuple[int, ...]]:
    """The numbers of logits of every step's rows, from now on."""
    steps: list[tuple[int, ...]] = []
    submit = rig.worker.submit

    def record(batch) -> None:
        steps.append(tuple(batch.num_logits.tolist()))
        submit(batch)

    rig.worker.submit = record
    return steps


@pytest.mark.parametrize("overlap", [False, True])
def test_right_guesses_make_steps_fewer(overlap: bool):
    rig = Rig(eos_every=NEVER, overlap=overlap)
    rig.worker.guesses = lambda step, row: (3, 3)
    steps = steps_of(rig)
    rig.add("a", PROMPT, 21, ignore_eos=True)
    rig.drain()

    assert rig.ids["a"] == expected_outputs(PROMPT, 21, NEVER, ignore_eos=True)
    # With overlap, the step after the prompt's has been planned when the first guess is known.
    assert steps == (
        [(1,), (4,), (4,), (4,), (4,), (4,)] if not overlap else [(1,), (1,), (4,), (4,), (4,), (4,), (3,)]
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_wrong_guesses_change_nothing(overlap: bool):
    rig = Rig(eos_every=NEVER, overlap=overlap)
    rig.worker.guesses = lambda step, row: (3, step % 3)
    rig.add("a", PROMPT, 20, ignore_eos=True)
    rig.drain()

    assert rig.ids["a"] == expected_outputs(PROMPT, 20, NEVER, ignore_eos=True)
    assert rig.worker.num_verified > 5
    assert 0 < rig.worker.num_hits < 20


def test_nothing_after_the_end_comes_out_of_right_guesses():
    """EOS, or the last token that was asked for, stands in the middle of them."""
    rig = Rig(eos_every=5)
    rig.worker.guesses = lambda step, row: (6, 6)
    for number in range(12):
        rig.add(f"r{number}", [*PROMPT, number % 2, number // 2 % 2, number // 4 % 2], 1 + number)
    rig.drain()

    for number in range(12):
        prompt = [*PROMPT, number % 2, number // 2 % 2, number // 4 % 2]
        assert rig.ids[f"r{number}"] == expected_outputs(prompt, 1 + number, 5)
    assert rig.worker.num_hits > 0
    rig.check_idle()


def test_rows_with_guesses_stay_in_one_step_and_share_its_logits():
    rig = Rig(eos_every=NEVER, max_running=32, num_pages=2000, step_tokens=128, chunk=64)
    rig.worker.guesses = lambda step, row: (20, 20)
    steps = steps_of(rig)
    for number in range(4):
        rig.add(f"r{number}", [*PROMPT, number % 2, number // 2], 100, ignore_eos=True)
    rig.drain()

    assert max(map(sum, steps)) == MOST_VERIFIED
    assert steps.count((MOST_VERIFIED // 4,) * 4) >= 4
    assert len(steps) < 12


def test_guesses_take_no_pages_from_a_running_request():
    """The pool holds what the two need, and no more."""
    rig = Rig(eos_every=NEVER, num_pages=2 * (len(PROMPT) + 20), chunk=16, overlap=False)
    rig.worker.guesses = lambda step, row: (6, step % 7)
    for rid in ("a", "b"):
        rig.add(rid, [int(rid == "a"), *PROMPT[1:]], 20, ignore_eos=True)
    rig.drain()

    assert rig.state.counters.num_retracted == 0
    assert rig.worker.num_verified > 0


def test_an_abort_between_steps_with_guesses_frees_everything():
    rig = Rig(eos_every=NEVER)
    rig.worker.guesses = lambda step, row: (4, 2)
    rig.add("a", PROMPT, 200, ignore_eos=True, stream=True)
    for _ in range(6):
        rig.turn()
    assert rig.worker.num_verified > 0
    rig.inbox.send(AbortReq(("a",)))
    rig.drain()

    want = expected_outputs(PROMPT, 200, NEVER, ignore_eos=True)
    assert rig.ids["a"] == want[: len(rig.ids["a"])]
    rig.check_idle()


def test_what_was_right_is_cached_and_nothing_else():
    rig = Rig(eos_every=NEVER, overlap=False)
    rig.worker.guesses = lambda step, row: (3, 1)
    rig.add("a", PROMPT, 12, ignore_eos=True)
    rig.drain()
    computed = rig.worker.num_computed
    known = PROMPT + rig.ids["a"]
    rig.add("b", [*known, 0], 1)
    rig.drain()

    assert rig.ids["b"] == expected_outputs([*known, 0], 1, NEVER)
    # The KV of the last token of "a" was never needed.
    assert rig.worker.num_computed - computed == 2


def test_a_request_with_guesses_lately_misses_no_step_for_the_next():
    """Planned beside the step before, a step could not have the guesses that come with its result."""
    rig = Rig(eos_every=NEVER)
    guessing = {5, 6, 8, 12, 30}
    rig.worker.guesses = lambda step, row: (3, 3) if step in guessing else (0, 0)
    steps = steps_of(rig)
    rig.add("a", PROMPT, 60, ignore_eos=True)
    rig.drain()

    with_guesses = [number for number, counts in enumerate(steps) if counts == (4,)]
    assert with_guesses == [7, 9, 13]  # those of steps 5 and 30 come too late for the next


def test_drafts_take_no_place_from_other_rows():
    """The first request always has as many guesses as a step has tokens."""
    rig = Rig(eos_every=NEVER, max_running=8, num_pages=2000, step_tokens=16, chunk=16, overlap=False)
    rig.worker.guesses = lambda step, row: (15, 15)
    steps = steps_of(rig)
    for number in range(4):
        rig.add(f"r{number}", [*PROMPT, number % 2, number // 2], 100, ignore_eos=True)
    rig.drain()

    of_all = [number for number, counts in enumerate(steps) if len(counts) == 4]
    assert len(of_all) > 5
    assert of_all == list(range(of_all[0], of_all[-1] + 1))


def test_a_request_that_ends_in_a_guess_counts_no_more_than_it_has():
    rig = Rig(eos_every=3)
    rig.worker.guesses = lambda step, row: (12, 12)
    rig.add("a", PROMPT, 40)
    rig.drain()

    counts = rig.state.counters.speculation
    assert 0 < counts.num_right < len(rig.ids["a"])
    assert counts.num_right <= counts.num_drafted


def test_with_too_many_rows_no_step_waits_for_guesses():
    rig = Rig(eos_every=NEVER, max_running=40, num_pages=4000, step_tokens=256, chunk=256)
    rig.worker.guesses = lambda step, row: (3, 3)
    for number in range(40):
        rig.add(f"r{number}", [*PROMPT, *(number >> bit & 1 for bit in range(6))], 30, ignore_eos=True)
    in_flight = []
    for _ in range(20):
        rig.turn()
        in_flight.append(len(rig.state.in_flight))
    rig.drain()

    assert in_flight[-1] == 1
    assert rig.worker.num_verified == 0
