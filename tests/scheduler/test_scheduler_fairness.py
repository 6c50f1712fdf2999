"""Keys share the machine by their weights, none starves, and waiting has its own time limit."""

import numpy as np
import pytest
from fake_worker import Rig

LONG = {"max_new_tokens": 12, "ignore_eos": True}


def prompt(seed: int, n: int = 10) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2, n).tolist()


def served(rig: Rig, tenant: str) -> int:
    """Output tokens of a tenant so far."""
    return sum(len(ids) for rid, ids in rig.ids.items() if rid.startswith(tenant))


def test_a_flood_of_one_key_does_not_delay_the_other_behind_it():
    rig = Rig(num_pages=2000, max_running=2, radix=False)
    for i in range(30):
        rig.add(f"flood{i}", prompt(i), tenant="flood", **LONG)
    rig.turn()
    rig.add("small", prompt(99), tenant="small", **LONG)
    while "small" not in rig.finish:
        rig.turn()

    # Two ran already, and two slots are shared from then on.
    assert sum(rid.startswith("flood") for rid in rig.finish) <= 4
    rig.drain()
    rig.check_idle()


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_service_of_keys_that_always_wait_is_in_the_proportion_of_their_weights(weight):
    rig = Rig(num_pages=2000, max_running=2, radix=False)
    for i in range(60):
        rig.add(f"a{i}", prompt(i), tenant="a", weight=weight, **LONG)
        rig.add(f"b{i}", prompt(1000 + i), tenant="b", **LONG)
    while len(rig.finish) < 40:
        rig.turn()

    assert served(rig, "a") / served(rig, "b") == pytest.approx(weight, rel=0.25)


def test_a_key_keeps_its_order_of_arrival():
    rig = Rig(num_pages=2000, max_running=1, radix=False)
    for i in range(6):
        rig.add(f"a{i}", prompt(i), tenant="a", **LONG)
        rig.add(f"b{i}", prompt(50 + i), tenant="b", **LONG)
    rig.drain()

    for tenant in "ab":
        own = [rid for rid in rig.finish if rid.startswith(tenant)]
        assert own == sorted(own)


def test_time_without_requests_earns_no_credit():
    rig = Rig(num_pages=2000, max_running=1, radix=False)
    for i in range(10):
        rig.add(f"old{i}", prompt(i), tenant="old", **LONG)
    rig.drain()
    for i in range(10):
        rig.add(f"new{i}", prompt(100 + i), tenant="new", **LONG)
        rig.add(f"old{10 + i}", prompt(200 + i), tenant="old", **LONG)
    while len(rig.finish) < 10 + 8:
        rig.turn()

    # Turns, although "new" has had nothing before.
    assert sum(rid.startswith("new") for rid in rig.finish) in (3, 4, 5)


def test_what_waits_too_long_is_refused_and_what_runs_is_not():
    rig = Rig(num_pages=2000, max_running=1, radix=False)
    rig.add("runs", prompt(1), max_new_tokens=60, ignore_eos=True, queue_deadline_s=0.3)
    rig.turn()
    rig.add("waits", prompt(2), queue_deadline_s=0.3, **LONG)
    rig.drain()

    assert rig.now > 0.5
    assert rig.finish["runs"].type == "length"
    assert (rig.finish["waits"].type, rig.finish["waits"].status_code) == ("abort", 503)
    rig.check_idle()


def test_the_deadline_of_the_whole_request_holds_while_it_runs():
    rig = Rig(num_pages=2000, max_running=1, radix=False)
    rig.add("late", prompt(1), max_new_tokens=200, ignore_eos=True, deadline_s=0.3, queue_deadline_s=10.0)
    rig.drain()

    assert (rig.finish["late"].type, rig.finish["late"].status_code) == ("abort", 408)
    assert rig.ids["late"]
    rig.check_idle()


def test_a_request_past_both_deadlines_ends_once_for_the_whole_one():
    rig = Rig(num_pages=2000, max_running=1, radix=False)
    rig.add("runs", prompt(1), max_new_tokens=60, ignore_eos=True)
    rig.turn()
    for i in range(3):
        rig.add(f"both{i}", prompt(2 + i), deadline_s=0.3, queue_deadline_s=0.3, **LONG)
    rig.add("queued", prompt(9), queue_deadline_s=0.3, **LONG)
    rig.drain()

    assert {rid: rig.finish[rid].status_code for rid in rig.finish if rid != "runs"} == {
        "both0": 408,
        "both1": 408,
        "both2": 408,
        "queued": 503,
    }
    assert rig.state.counters.num_aborted == 4
    rig.check_idle()


def test_a_retracted_request_is_not_refused_for_waiting():
    rig = Rig(num_pages=40, max_running=4, radix=False)
    for i in range(2):
        rig.add(f"r{i}", prompt(i, 4), max_new_tokens=20, ignore_eos=True, queue_deadline_s=0.1)
    rig.drain()

    assert rig.state.counters.num_retracted > 0
    assert {finish.type for finish in rig.finish.values()} == {"length"}


def test_the_story_of_a_sample_comes_with_its_end():
    rig = Rig(num_pages=40, max_running=4, radix=False, chunk=3)
    for i in range(2):
        rig.add(f"r{i}", prompt(i, 4), max_new_tokens=20, ignore_eos=True)
    rig.drain()

    last = {rid: rows[-1].stats for rid, rows in rig.rows.items()}
    retracted = next(stats for stats in last.values() if stats.num_retractions)
    kinds = [event.kind for event in retracted.events]
    assert kinds[:2] == ["admitted", "chunk"]
    assert kinds.count("retracted") == retracted.num_retractions
    assert kinds.count("admitted") == 1 + retracted.num_retractions
    times = [event.at_s for event in retracted.events]
    assert times == sorted(times)
    never = next(stats for stats in last.values() if not stats.num_retractions)
    assert sum(event.num_tokens for event in never.events if event.kind == "chunk") == 4
    assert all(row.stats.events == () for rows in rig.rows.values() for row in rows[:-1] if row.stats)
