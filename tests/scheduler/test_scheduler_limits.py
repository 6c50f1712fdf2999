"""Limits that change while requests run: from the next step on, and without a difference in any output."""

import math

import pytest
from fake_worker import Rig

from headrace.messages.control import FreezeGCReq, SetLimitsReq
from headrace.scheduler import scheduler as scheduler_module
from headrace.scheduler.admission import INITIAL_RATIO, NewTokenRatio


def told(rig, **changes):
    limits = {"max_running": 8, "max_queued": 1000, "chunk_tokens": 8, "conservativeness": 1.0, "max_step_s": math.inf}
    rig.inbox.send(SetLimitsReq(**(limits | changes)))


@pytest.mark.parametrize("overlap", [False, True])
def test_fewer_and_more_may_run(overlap):
    rig, plain = Rig(overlap=overlap), Rig(overlap=overlap)
    for each in (rig, plain):
        for i in range(6):
            each.add(f"r{i}", [1, 0, i % 2, i // 2 % 2], max_new_tokens=20, ignore_eos=True)
    plain.drain()
    told(rig, max_running=2)
    most = 0
    for _ in range(6):
        rig.turn()
        most = max(most, len(rig.state.running))
    assert most == 2
    told(rig, max_running=6)
    for _ in range(3):
        rig.turn()
    assert len(rig.state.running) > 2
    rig.drain()
    assert rig.ids == plain.ids
    rig.check_idle()


def test_never_more_run_than_the_pool_has_places_for():
    rig = Rig(max_running=2)
    told(rig, max_running=10**6)
    rig.turn()
    assert rig.state.config.max_running == rig.kv.max_seqs


def test_chunks_and_the_bound_of_the_queue_follow():
    rig = Rig(max_running=1)
    told(rig, chunk_tokens=2, max_queued=1)
    rig.turn()
    rig.add("long", [1, 0] * 4, max_new_tokens=1)
    rig.add("waits", [1], max_new_tokens=1)
    rig.turn()
    assert "waits" in rig.finish
    rig.drain()
    chunks = [event.num_tokens for event in rig.rows["long"][-1].stats.events if event.kind == "chunk"]
    assert chunks == [2, 2, 2, 2]


def test_the_bound_on_the_time_of_a_step_follows():
    rig = Rig(max_step_s=0.2)
    told(rig, max_step_s=0.04)
    rig.turn()
    assert rig.state.config.max_step_s == 0.04


def test_another_conservativeness_begins_anew():
    ratio = NewTokenRatio(1.0)
    for _ in range(50):
        ratio.step()
    ratio.scale(0.5)
    assert ratio.value == pytest.approx(INITIAL_RATIO * 0.5)


def test_a_scheduler_freezes_when_told(monkeypatch):
    calls = []
    monkeypatch.setattr(scheduler_module, "freeze", lambda: calls.append(1))
    rig = Rig()
    rig.inbox.send(FreezeGCReq())
    rig.turn()
    assert calls == [1]


def test_rows_are_dealt_to_the_steps_in_flight_of_a_pipeline():
    rig = Rig(num_stages=3, max_running=8, num_pages=400, step_tokens=64, chunk=64, radix=False)
    for i in range(7):
        rig.add(f"r{i}", [0, 1, i % 2], max_new_tokens=30, ignore_eos=True)
    in_flight = []
    for _ in range(12):
        rig.turn()
        in_flight.append([len(batch.rows) for batch in rig.state.in_flight])  # one of three was committed

    assert in_flight[1:10] == [[3, 1], [1, 3], [3, 3]] * 3
    rig.drain()
    assert all(len(ids) == 30 for ids in rig.ids.values())
