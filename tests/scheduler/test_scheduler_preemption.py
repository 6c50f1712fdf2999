"""A waiting request of much higher priority takes the place of running ones, and nobody starves of it."""

import numpy as np
import pytest
from fake_worker import Rig, expected_outputs
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages.control import AbortReq
from headrace.scheduler.retract import MAX_PREEMPTIONS

LONG = {"max_new_tokens": 60, "ignore_eos": True, "stream": True}
SHORT = {"max_new_tokens": 6, "ignore_eos": True, "stream": True}


def prompt(seed: int, n: int = 6) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2, n).tolist()


def rig_of(**options: object) -> Rig:
    return Rig(**{"num_pages": 1000, "policy": "priority", "preemption": 5, **options})


def running(rig: Rig) -> set[str]:
    return {req.rid for req in rig.state.running}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("radix", [True, False])
def test_an_important_request_takes_the_place_of_the_least_important_and_latest(overlap, radix):
    rig = rig_of(max_running=3, overlap=overlap, radix=radix)
    for i, priority in enumerate([1, 0, 0]):
        rig.add(f"r{i}", prompt(i), priority=priority, **LONG)
        rig.turn()
    for _ in range(5):
        rig.turn()
    rig.add("urgent", prompt(9), priority=6, **SHORT)
    for _ in range(4):
        rig.turn()

    assert running(rig) == {"r0", "r1", "urgent"}
    rig.drain()
    assert [rig.rows[f"r{i}"][-1].stats.num_retractions for i in range(3)] == [0, 0, 1]
    for i in range(3):
        assert rig.ids[f"r{i}"] == expected_outputs(prompt(i), 60, 9, True)
    rig.check_idle()


def test_a_difference_below_the_threshold_waits():
    rig = rig_of(max_running=1)
    rig.add("runs", prompt(1), priority=0, **LONG)
    rig.turn()
    rig.add("waits", prompt(2), priority=4, **SHORT)
    rig.drain()

    assert list(rig.finish) == ["runs", "waits"]
    assert rig.state.counters.num_retracted == 0


def test_it_is_off_unless_asked_for():
    rig = rig_of(max_running=1, preemption=0)
    rig.add("runs", prompt(1), priority=0, **LONG)
    rig.turn()
    rig.add("waits", prompt(2), priority=100, **SHORT)
    rig.drain()

    assert list(rig.finish) == ["runs", "waits"]


def test_who_aged_while_waiting_does_not_take_its_place_back():
    rig = rig_of(max_running=1)
    rig.add("low", prompt(1), priority=0, **LONG)
    rig.turn()
    rig.now += 10_000.0  # in the queue it would now go before everybody
    rig.add("high", prompt(2), priority=5, **SHORT)
    rig.drain()

    assert list(rig.finish) == ["high", "low"]
    assert rig.rows["low"][-1].stats.num_retractions == 1


def test_requests_of_another_key_are_never_displaced():
    rig = rig_of(max_running=1)
    rig.add("theirs", prompt(1), priority=0, tenant="a", **LONG)
    rig.turn()
    rig.add("mine", prompt(2), priority=100, tenant="b", **SHORT)
    rig.drain()

    assert list(rig.finish) == ["theirs", "mine"]


def test_pages_are_freed_as_well_as_places():
    rig = rig_of(num_pages=100, max_running=8, radix=False)
    rig.add("big", prompt(1, 70), priority=0, max_new_tokens=20, ignore_eos=True)
    for _ in range(15):
        rig.turn()
    rig.add("urgent", prompt(2, 60), priority=9, **SHORT)
    rig.drain()

    assert list(rig.finish) == ["urgent", "big"]
    rig.check_idle()


def test_nobody_makes_way_in_vain():
    rig = rig_of(num_pages=100, max_running=8, radix=False)
    rig.add("equal", prompt(1, 60), priority=9, max_new_tokens=20, ignore_eos=True)
    rig.add("small", prompt(3, 4), priority=0, max_new_tokens=10, ignore_eos=True)
    for _ in range(15):
        rig.turn()
    rig.add("urgent", prompt(2, 60), priority=9, **SHORT)
    rig.drain()

    assert rig.state.counters.num_retracted == 0


def test_a_stream_of_important_requests_displaces_one_a_few_times_and_then_no_more():
    rig = rig_of(max_running=1)
    rig.add("low", prompt(1), priority=0, **LONG)
    for i in range(40):
        for _ in range(9):
            rig.turn()
        rig.add(f"high{i}", prompt(10 + i), priority=5, **SHORT)
        rig.now += 10.0  # it ages in the queue, or it would wait as long as others come
    assert "low" in rig.finish
    rig.drain()

    assert rig.rows["low"][-1].stats.num_retractions == MAX_PREEMPTIONS


@settings(max_examples=300, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 20), st.integers(-6, 6), st.integers(0, 4), st.booleans()),
        min_size=2,
        max_size=14,
    ),
    threshold=st.integers(1, 6),
    max_running=st.integers(1, 4),
    num_pages=st.integers(45, 120),
    overlap=st.booleans(),
    radix=st.booleans(),
)
def test_whoever_makes_way_ends_with_its_tokens(arrivals, threshold, max_running, num_pages, overlap, radix):
    rig = rig_of(num_pages=num_pages, max_running=max_running, preemption=threshold, overlap=overlap, radix=radix)
    for i, (length, max_new, priority, turns, abort) in enumerate(arrivals):
        rig.add(f"r{i}", prompt(i, length), max_new, ignore_eos=True, priority=priority, stream=True)
        for _ in range(turns):
            rig.turn()
        preempted = [req.num_preemptions for req in rig.state.by_rid.values()]
        assert max(preempted, default=0) <= MAX_PREEMPTIONS
        if abort:
            rig.inbox.send(AbortReq((f"r{i // 2}",)))
    rig.drain()

    for i, (length, max_new, _, _, _) in enumerate(arrivals):
        want = expected_outputs(prompt(i, length), max_new, 9, True)
        assert rig.ids[f"r{i}"] == (want if rig.finish[f"r{i}"].type == "length" else want[: len(rig.ids[f"r{i}"])])
    rig.check_idle()
