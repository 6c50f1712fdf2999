"""Keys share the machine by their weights, none starves, and waiting has its own time limit."""

from collections import Counter

import numpy as np
import pytest
from fake_worker import Rig, expected_outputs
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages.control import AbortReq
from headrace.scheduler import retract
from headrace.scheduler.fairness import WINDOW_S
from headrace.scheduler.retract import MAX_PREEMPTIONS

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


FLOOD = {"max_new_tokens": 400, "ignore_eos": True}


def wide_rig(**options: object) -> Rig:
    """Whose steps have room for all prompts."""
    return Rig(chunk=256, step_tokens=512, **options)


def turns_until(rig: Rig, rid: str, most: int = 2000) -> int:
    """Turns of the scheduler until the request has ended."""
    for count in range(most):
        if rid in rig.finish:
            return count
        rig.turn()
    raise AssertionError(f"{rid} has not ended")


def flooded(rig: Rig, count: int = 16, **options: object) -> Rig:
    for i in range(count):
        rig.add(f"a{i}", prompt(i), tenant="a", **FLOOD, **options)
    for _ in range(6):
        rig.turn()
    return rig


def retracted(rig: Rig) -> dict[str, int]:
    return {req.rid: req.num_retractions for req in rig.state.by_rid.values() if req.num_retractions}


@pytest.mark.parametrize("overlap", [True, False])
def test_who_has_all_places_gives_one_back_to_another_and_its_youngest_goes(overlap: bool):
    rig = flooded(wide_rig(num_pages=20_000, max_running=16, overlap=overlap))
    rig.add("b0", prompt(99), tenant="b", max_new_tokens=2)

    assert turns_until(rig, "b0") < 12
    assert retracted(rig) == {"a15": 1}
    rig.drain()
    assert all(rig.ids[f"a{i}"] == expected_outputs(prompt(i), 400, 9, True) for i in range(16))
    rig.check_idle()


def test_a_burst_gets_its_places_at_once():
    rig = flooded(wide_rig(num_pages=20_000, max_running=16))
    for i in range(20):
        rig.add(f"b{i}", prompt(100 + i), tenant="b", **FLOOD)
    for _ in range(4):
        rig.turn()

    assert Counter(req.asked.tenant for req in rig.state.running) == {"a": 8, "b": 8}
    assert retracted(rig) == {f"a{i}": 1 for i in range(8, 16)}


def test_the_place_that_another_has_used_is_kept_for_it_while_it_comes_and_then_no_longer():
    rig = flooded(wide_rig(num_pages=20_000, max_running=16))
    for i in range(20):
        rig.add(f"b{i}", prompt(100 + i), tenant="b", max_new_tokens=2)
        turns_until(rig, f"b{i}")
        rig.now += 0.1

    assert retracted(rig) == {"a15": 1}, "one for all of them"
    assert len(rig.state.running) == 15
    rig.now += 2 * WINDOW_S
    rig.turn()
    rig.turn()
    assert len(rig.state.running) == 16


def test_two_tenants_with_long_requests_come_to_their_shares_and_stay_there():
    rig = flooded(wide_rig(num_pages=20_000, max_running=12), 12)
    for i in range(12):
        rig.add(f"b{i}", prompt(50 + i), tenant="b", weight=2.0, **FLOOD)
    for _ in range(60):
        rig.turn()
        rig.now += 0.1

    assert Counter(req.asked.tenant for req in rig.state.running) == {"a": 4, "b": 8}
    assert rig.state.counters.num_retracted == 8
    rig.drain()
    rig.check_idle()


def test_many_who_come_keep_no_more_than_a_sixteenth_of_the_places_from_one_with_much_work():
    rig = wide_rig(num_pages=20_000, max_running=32)
    for i in range(8):
        for j in range(4):
            rig.add(f"{i}-{j}", prompt(100 + 4 * i + j), tenant=f"t{i}", max_new_tokens=2)
    rig.drain()
    flooded(rig, 40)

    assert len(rig.state.running) == 30


def test_a_sample_gives_way_three_times_and_no_more():
    rig = flooded(wide_rig(num_pages=20_000, max_running=2), 2)
    for i in range(8):
        rig.add(f"b{i}", prompt(100 + i), tenant="b", max_new_tokens=2)
        for _ in range(8):
            rig.turn()
        rig.now += 3 * WINDOW_S  # so that b has nothing any more

    assert retracted(rig) == {"a0": 3, "a1": 3}
    assert "b5" in rig.finish
    assert "b6" not in rig.finish


def test_pages_are_given_back_as_well_as_places_and_the_older_ones_of_the_others_stay():
    rig = wide_rig(num_pages=120, max_running=16, radix=False)
    for i in range(3):
        rig.add(f"a{i}", prompt(i), tenant="a", max_new_tokens=60, ignore_eos=True)
    for _ in range(30):
        rig.turn()
    rig.add("b0", prompt(99, 30), tenant="b", max_new_tokens=4, ignore_eos=True)

    assert turns_until(rig, "b0") < 20
    assert set(retracted(rig)) <= {"a2", "a1"}
    assert retracted(rig)
    rig.drain()
    rig.check_idle()


def test_where_the_cache_is_full_the_one_above_its_share_gives_way_though_another_is_younger():
    rig = wide_rig(num_pages=100, max_running=16, radix=False)
    rig.state.ratio.scale(0.01)  # so little is reserved for outputs that the pool runs full
    rig.add("a0", prompt(1, 40), tenant="a", max_new_tokens=50, ignore_eos=True)
    rig.add("a1", prompt(2, 20), tenant="a", max_new_tokens=50, ignore_eos=True)
    rig.turn()
    rig.add("b0", prompt(3, 10), tenant="b", max_new_tokens=20, ignore_eos=True)
    turns_until(rig, "b0")

    assert rig.rows["b0"][-1].stats.num_retractions == 0
    rig.drain()
    rig.check_idle()


def test_what_many_samples_share_counts_once():
    rig = wide_rig(num_pages=1000, max_running=20)
    for i in range(16):
        rig.add(f"c{i}", prompt(200 + i), tenant="c", max_new_tokens=60, ignore_eos=True)
    for _ in range(3):
        rig.turn()
    for i in range(4):
        rig.add(f"a{i}", prompt(1, 200), tenant="a", group="a", max_new_tokens=60, ignore_eos=True)
    for _ in range(8):
        rig.turn()
    for i in range(6):
        rig.add(f"b{i}", prompt(99 + i), tenant="b", max_new_tokens=8, ignore_eos=True)
    for _ in range(8):
        rig.turn()

    assert {rid[0] for rid in retracted(rig)} == {"c"}
    assert Counter(req.asked.tenant for req in rig.state.running)["a"] == 4


@pytest.mark.parametrize("radix", [True, False])
def test_the_oldest_of_a_tenant_above_its_share_comes_to_its_end(radix: bool):
    rig = Rig(num_pages=100, max_running=8, chunk=64, step_tokens=128, radix=radix)
    rig.add("a0", prompt(1, 45), tenant="a", max_new_tokens=50, ignore_eos=True)
    rig.turn()
    count = 0
    while "a0" not in rig.finish and count < 100:
        rig.state.ratio.scale(0.01)  # so little is reserved for outputs that the pool runs full
        if sum(rid.startswith("b") for rid in rig.state.by_rid) < 3:
            rig.add(f"b{count}", prompt(100 + count, 5), tenant="b", max_new_tokens=30, ignore_eos=True)
            count += 1
        rig.turn()

    assert rig.rows["a0"][-1].stats.num_retractions <= MAX_PREEMPTIONS


def test_what_the_server_and_its_operator_ask_is_outside_of_all_shares():
    rig = wide_rig(num_pages=20_000, max_running=16)  # of which one is kept for a tenant that came lately
    rig.add("probe", prompt(99), tenant="", max_new_tokens=2)
    turns_until(rig, "probe")
    flooded(rig, 20)
    assert len(rig.state.running) == 16, "nothing is kept for it"
    for i in range(4):
        rig.add(f"s{i}", prompt(50 + i), tenant="", **FLOOD)
    for _ in range(4):
        rig.turn()
    assert not retracted(rig)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_what_may_not_begin_takes_no_place_from_what_may(policy: str):
    """While requests that have begun come to their end, of a tenant with many behind the gate."""
    rig = Rig(num_pages=2000, max_running=8, chunk=64, step_tokens=128, policy=policy, overlap=False)
    rig.add("old", prompt(1), tenant="a", max_new_tokens=40, ignore_eos=True, priority=0)
    for _ in range(8):
        rig.turn()
    for i in range(30):
        rig.add(f"a{i}", prompt(10 + i), tenant="a", priority=5, **LONG)
    rig.add("b", prompt(6), tenant="b", max_new_tokens=2)
    rig.state.gate.draining = True
    req = rig.state.by_rid["old"]
    while req.num_in_flight:
        rig.turn()
    retract.preempt(rig.state, [req])

    assert turns_until(rig, "old") < 60


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 20), st.integers(0, 3), st.integers(0, 4), st.booleans()),
        min_size=2,
        max_size=16,
    ),
    max_running=st.integers(1, 6),
    num_pages=st.integers(45, 120),
    overlap=st.booleans(),
    radix=st.booleans(),
    seconds=st.sampled_from([0.0, 1.0, 15.0]),
)
def test_whoever_gives_way_to_another_tenant_ends_with_its_tokens(
    arrivals, max_running, num_pages, overlap, radix, seconds
):
    rig = Rig(num_pages=num_pages, max_running=max_running, overlap=overlap, radix=radix)
    for i, (length, max_new, tenant, turns, abort) in enumerate(arrivals):
        rig.add(
            f"r{i}", prompt(i, length), max_new, ignore_eos=True, tenant=f"t{tenant}", weight=1.0 + tenant, stream=True
        )
        for _ in range(turns):
            rig.turn()
        rig.now += seconds
        if abort:
            rig.inbox.send(AbortReq((f"r{i // 2}",)))
    rig.drain()

    for i, (length, max_new, *_) in enumerate(arrivals):
        want = expected_outputs(prompt(i, length), max_new, 9, True)
        assert rig.ids[f"r{i}"] == (want if rig.finish[f"r{i}"].type == "length" else want[: len(rig.ids[f"r{i}"])])
    rig.check_idle()
