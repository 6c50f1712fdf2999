"""What the scheduler promises, one behaviour a test, on the fake worker."""

from types import SimpleNamespace
from typing import get_type_hints

import msgspec
import numpy as np
import pytest
from fake_worker import EOS, Rig, expected_outputs

from headrace.messages.control import (
    AbortReq,
    FaultReq,
    HealthCheckReply,
    Outcome,
    ShutdownReq,
)
from headrace.messages.operations import (
    CACHE_TREE,
    CHECK_HEALTH,
    FLUSH_CACHE,
    INTERNAL_STATE,
    OPERATIONS,
    SLOW_DOWN,
    START_PROFILE,
    CacheTreeQuery,
    Nothing,
    OperationReply,
    OperationReq,
    SlowDownBody,
    StartProfileBody,
)
from headrace.messages.requests import (
    BatchTokenizedGenerateReqInput,
    PromptContent,
    SampleTask,
    TokenizedGenerateReqInput,
)
from headrace.sampling.params import ResolvedSamplingParams
from headrace.scheduler.control import Operations

LONG = {"max_new_tokens": 40, "ignore_eos": True}


def prompt(n: int, start: int = 0) -> list[int]:
    rng = np.random.default_rng(start)
    return rng.integers(0, 2, n).tolist()


@pytest.mark.parametrize("overlap", [True, False])
def test_samples_of_one_prompt_prefill_it_once(overlap):
    rig = Rig(num_pages=400, overlap=overlap, chunk=16, step_tokens=64)
    for j in range(4):
        rig.add(f"s{j}", prompt(50), 5, group="g", ignore_eos=True)
    rig.drain()

    # Each later sample computes only the last prompt token, for its own logits.
    assert rig.state.counters.computed_prefill_tokens == 50 + 3
    assert [rig.rows[f"s{j}"][-1].stats.cached_tokens for j in range(4)] == [0, 0, 0, 0]
    rig.check_idle()


def test_requests_that_share_a_long_prefix_wait_for_it_instead_of_computing_it_each():
    rig = Rig(num_pages=2000, chunk=50, step_tokens=200)
    shared = prompt(100)
    for i in range(5):
        rig.add(f"r{i}", shared + prompt(7, start=i + 1), 3, ignore_eos=True)
    rig.drain()

    assert rig.state.counters.computed_prefill_tokens <= 107 + 4 * 8


def test_without_the_radix_cache_nobody_waits_for_a_prefix():
    rig = Rig(num_pages=2000, radix=False, chunk=200, step_tokens=2000)
    for i in range(4):
        rig.add(f"r{i}", prompt(100), 3, ignore_eos=True)
    rig.turn()

    assert len(rig.state.running) == 4


def test_cached_tokens_is_what_was_cached_before_and_never_the_whole_prompt():
    rig = Rig(num_pages=200)
    rig.add("a", prompt(20), 1, ignore_eos=True)
    rig.drain()
    rig.add("b", prompt(20), 1, ignore_eos=True)
    rig.drain()

    assert rig.rows["a"][-1].stats.cached_tokens == 0
    assert rig.rows["b"][-1].stats.cached_tokens == 19


def test_decode_rows_ride_along_with_a_prefill_chunk():
    rig = Rig(num_pages=400, chunk=8, step_tokens=16, overlap=False)
    rig.add("decoding", prompt(4), stream=True, **LONG)
    for _ in range(3):
        rig.turn()
    before = len(rig.ids["decoding"])
    rig.add("long", prompt(60, start=3), stream=True, **LONG)
    for _ in range(4):
        rig.turn()

    assert len(rig.ids["decoding"]) == before + 4
    assert "long" not in rig.ids  # still prefilling


def test_queued_abort_answers_at_once_and_prefills_nothing():
    rig = Rig(num_pages=400, max_running=1)
    rig.add("running", prompt(4), **LONG)
    rig.turn()
    rig.add("queued", prompt(30, start=2), **LONG)
    rig.inbox.send(AbortReq(("queued",)))
    computed = rig.worker.num_computed
    rig.turn()

    assert rig.finish["queued"].type == "abort"
    assert rig.ids["queued"] == []
    assert rig.worker.num_computed - computed <= 2


@pytest.mark.parametrize("overlap", [True, False])
def test_running_abort_frees_its_pages_within_a_step_and_keeps_the_partial_output(overlap):
    rig = Rig(num_pages=100, overlap=overlap)
    rig.add("a", prompt(10), **LONG)
    for _ in range(8):
        rig.turn()
    rig.inbox.send(AbortReq(("a",)))
    rig.turn()
    rig.turn()

    assert rig.finish["a"].type == "abort"
    assert rig.finish["a"].status_code == 0
    assert rig.ids["a"] == expected_outputs(prompt(10), 40, 9, True)[: len(rig.ids["a"])]
    assert len(rig.ids["a"]) > 3
    assert rig.kv.state().leased_tokens == 0


def test_abort_takes_the_exact_rid_and_unknown_rids_are_nothing():
    rig = Rig(num_pages=400)
    rig.add("req-1", prompt(4), **LONG)
    rig.add("req-10", prompt(5), **LONG)
    rig.turn()
    rig.inbox.send(AbortReq(("req-1", "req", "nobody")))
    rig.drain()

    assert rig.finish["req-1"].type == "abort"
    assert rig.finish["req-10"].type == "length"


def test_abort_all_ends_running_and_waiting():
    rig = Rig(num_pages=400, max_running=2)
    for i in range(6):
        rig.add(f"r{i}", prompt(4, start=i), **LONG)
    rig.turn()
    rig.inbox.send(AbortReq(abort_all=True))
    rig.drain()

    assert {f.type for f in rig.finish.values()} == {"abort"}
    assert len(rig.finish) == 6
    rig.check_idle()


def test_a_lone_request_that_outgrows_the_pool_is_ended_with_a_message_and_the_next_one_is_served():
    rig = Rig(num_pages=30)
    rig.add("big", prompt(20), 100, ignore_eos=True)
    rig.drain()
    rig.add("small", prompt(5), 3, ignore_eos=True)
    rig.drain()

    assert rig.finish["big"].type == "abort"
    assert "30 tokens" in rig.finish["big"].message
    assert rig.ids["big"] == expected_outputs(prompt(20), 100, 9, True)[: len(rig.ids["big"])]
    assert rig.finish["small"].type == "length"
    rig.check_idle()


def test_a_prompt_larger_than_the_pool_is_refused():
    rig = Rig(num_pages=30)
    rig.add("big", prompt(30), 4)
    rig.drain()

    assert rig.finish["big"].status_code == 400
    assert "30 tokens but the KV cache holds only 30" in rig.finish["big"].message


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("radix", [True, False])
def test_retraction_really_happens_and_changes_no_token(page_size, radix):
    rig = Rig(num_pages=120 // page_size, page_size=page_size, radix=radix, eos_every=1000)
    for i in range(8):
        rig.add(f"r{i}", prompt(4, start=i), 60, ignore_eos=True, stream=True)
    rig.drain()

    assert rig.state.counters.num_retracted > 0
    for i in range(8):
        assert rig.ids[f"r{i}"] == expected_outputs(prompt(4, start=i), 60, 1000, True)
    rig.check_idle()


def test_under_pressure_the_oldest_request_is_never_the_victim():
    rig = Rig(num_pages=100, eos_every=1000)
    for i in range(6):
        rig.add(f"r{i}", prompt(4, start=i), 60, ignore_eos=True)
    rig.drain()

    assert rig.rows["r0"][-1].stats.num_retractions == 0


def test_a_step_that_fails_ends_its_requests_and_no_others():
    rig = Rig(num_pages=400, max_running=1, overlap=False)
    rig.worker.fail_steps = {3}
    rig.add("unlucky", prompt(4), **LONG)
    rig.add("lucky", prompt(5), **LONG)
    rig.drain()

    assert (rig.finish["unlucky"].type, rig.finish["unlucky"].status_code) == ("abort", 500)
    assert rig.finish["lucky"].type == "length"
    rig.check_idle()


def test_a_row_with_nan_ends_alone_and_leaves_nothing_in_the_cache():
    rig = Rig(num_pages=400)
    rig.worker.nan_rids = {"bad"}
    rig.add("bad", prompt(20), **LONG)
    other = [1 - prompt(20)[0], *prompt(20, start=5)]  # shares nothing
    rig.add("good", other, **LONG)
    rig.drain()

    assert (rig.finish["bad"].status_code, rig.finish["bad"].message) == (500, "the model produced NaN")
    assert rig.ids["good"] == expected_outputs(other, 40, 9, True)
    assert rig.kv.parts[0].cache.peek(np.array(prompt(20), np.int32).tobytes(), "", 20) == 0


def test_prefill_only_ends_with_length_and_no_token():
    rig = Rig(num_pages=100, chunk=4)
    rig.add("a", prompt(10), 0)
    rig.drain()

    assert rig.finish["a"].type == "length"
    assert rig.ids["a"] == []
    assert rig.worker.num_computed == 10


def test_a_stop_string_precedes_eos_which_precedes_length():
    class Checker:
        def push(self, token_id):
            return SimpleNamespace(matched="xx") if token_id == EOS else None

    want = expected_outputs(prompt(6), 40, 3)
    assert want[-1] == EOS
    for with_checker, matched in ((True, "xx"), (False, EOS)):
        rig = Rig(num_pages=100, eos_every=3)
        rig.scheduler.stop_checkers = lambda request: Checker()
        rig.inbox.send(
            TokenizedGenerateReqInput(
                "a",
                PromptContent(np.array(prompt(6), np.int32).tobytes()),
                SampleTask(
                    ResolvedSamplingParams(max_new_tokens=len(want), seed=0, stop=("xx",) if with_checker else ())
                ),
            )
        )
        rig.drain()
        assert (rig.finish["a"].type, rig.finish["a"].matched) == ("stop", matched)
        assert rig.ids["a"] == want


def test_the_step_in_flight_after_an_end_emits_nothing_and_leaks_nothing():
    rig = Rig(num_pages=100, overlap=True, eos_every=2)
    rig.add("a", prompt(6), 40)
    while "a" not in rig.finish:
        rig.turn()
    num_rows = len(rig.rows["a"])
    rig.drain()

    assert len(rig.rows["a"]) == num_rows
    rig.check_idle()


@pytest.mark.parametrize("interval, expected", [(1, 11), (5, 3), (100, 2)])
def test_a_stream_reports_first_token_then_every_interval_then_the_end(interval, expected):
    rig = Rig(num_pages=100)
    sampling = ResolvedSamplingParams(max_new_tokens=11, seed=0, ignore_eos=True, stream_interval=interval)
    rig.inbox.send(
        TokenizedGenerateReqInput(
            "a", PromptContent(np.array([1, 0], np.int32).tobytes()), SampleTask(sampling, stream=True)
        )
    )
    rig.drain()

    # first token; then each time `interval` more are there; the last always
    assert len(rig.rows["a"]) in (expected, expected + 1)
    assert rig.rows["a"][0].num_output_tokens == 1
    assert len(rig.ids["a"]) == 11


def test_a_full_queue_refuses_with_503():
    rig = Rig(num_pages=400, max_running=1, max_queued=2)
    for i in range(5):
        rig.add(f"r{i}", prompt(4, start=i), **LONG)
    rig.turn()

    refused = [f for f in rig.finish.values() if f.status_code == 503]
    assert len(refused) == 3


def test_a_deadline_ends_waiting_and_running_requests():
    rig = Rig(num_pages=400, max_running=1)
    rig.add("running", prompt(4), deadline_s=0.5, **LONG)
    rig.add("waiting", prompt(5), deadline_s=0.5, **LONG)
    rig.turn()
    rig.now = 1.0
    rig.turn()
    rig.turn()

    assert {rid: f.status_code for rid, f in rig.finish.items()} == {"running": 408, "waiting": 408}


def test_priorities_order_the_queue_and_age():
    rig = Rig(num_pages=400, max_running=1, policy="priority")
    rig.add("first", prompt(4), 4, ignore_eos=True, priority=0)
    rig.turn()
    rig.add("low", prompt(5), 4, ignore_eos=True, priority=0)
    rig.turn()
    rig.now += 25.0  # low has aged by two
    rig.add("high", prompt(6), 4, ignore_eos=True, priority=1)
    rig.drain()

    assert list(rig.finish) == ["first", "low", "high"]


def test_lpm_takes_the_longest_cached_prefix_first_but_starves_nobody():
    rig = Rig(num_pages=400, max_running=1, policy="lpm")
    rig.add("warm", prompt(20), 2, ignore_eos=True)
    rig.drain()
    rig.add("busy", prompt(4, start=9), 4, ignore_eos=True)
    rig.turn()
    rig.add("cold", prompt(20, start=7), 2, ignore_eos=True)
    rig.add("hit", prompt(20), 2, ignore_eos=True)
    rig.drain()
    assert list(rig.finish)[-2:] == ["hit", "cold"]

    rig.add("busy2", prompt(4, start=9), 4, ignore_eos=True)
    rig.turn()
    rig.add("old", prompt(20, start=17), 2, ignore_eos=True)
    rig.turn()
    rig.now += 10.0
    rig.add("hit2", prompt(20), 2, ignore_eos=True)
    rig.drain()
    assert list(rig.finish)[-2:] == ["old", "hit2"]


def test_a_long_prompt_is_served_under_a_stream_of_short_ones():
    rig = Rig(num_pages=300, max_running=3, chunk=16, step_tokens=32)
    for i in range(3):
        rig.add(f"s{i}", prompt(5, start=i), 6, ignore_eos=True)
    rig.turn()
    rig.add("long", prompt(150, start=99), 2, ignore_eos=True)
    for i in range(3, 60):
        rig.add(f"s{i}", prompt(5, start=i), 6, ignore_eos=True)
        rig.turn()

    assert "long" in rig.finish


def test_flush_is_refused_while_busy_and_empties_the_cache_when_idle():
    rig = Rig(num_pages=100)
    rig.add("a", prompt(10), **LONG)
    rig.turn()
    rig.inbox.send(FLUSH_CACHE.message(1, Nothing()))
    rig.drain()
    rig.inbox.send(FLUSH_CACHE.message(2, Nothing()))
    rig.turn()

    replies = [rig.reply(FLUSH_CACHE, message_id) for message_id in (1, 2)]
    assert [reply.success for reply in replies] == [False, True]
    assert "running" in replies[0].message
    assert rig.kv.state().free_tokens == 100


def test_health_and_state_are_answered_at_the_next_turn():
    rig = Rig(num_pages=100)
    rig.add("a", prompt(10), **LONG)
    rig.inbox.send(CHECK_HEALTH.message(5, Nothing()))
    rig.inbox.send(INTERNAL_STATE.message(6, Nothing()))
    rig.turn()

    assert rig.reply(CHECK_HEALTH, 5) == HealthCheckReply(busy=False)
    state = rig.reply(INTERNAL_STATE, 6)
    assert state.num_waiting == 1
    assert state.pool.consistent


def test_the_outline_of_the_cache_is_told_while_requests_run():
    rig = Rig(num_pages=100)
    rig.add("a", prompt(10), **LONG)
    for _ in range(4):
        rig.turn()
    rig.inbox.send(CACHE_TREE.message(7, CacheTreeQuery(max_depth=4, max_nodes=10)))
    rig.turn()

    tree = rig.reply(CACHE_TREE, 7)
    assert tree.num_tokens == sum(node.num_tokens for node in tree.nodes) >= 10
    assert [node.num_leases for node in tree.nodes] == [1] * tree.num_nodes


def test_a_profile_is_started_by_the_worker_and_an_activity_counts_once():
    rig, seen = Rig(num_pages=100), []
    rig.worker.profile = lambda request: seen.append(request) or "profiling"
    rig.inbox.send(START_PROFILE.message(1, StartProfileBody("run-1", 5, ("CPU", "CPU"))))
    rig.turn()

    assert rig.reply(START_PROFILE, 1) == Outcome(True, "profiling")
    assert seen == [StartProfileBody("run-1", 5, ("CPU",))]


def test_a_slowed_scheduler_sleeps_after_each_step_until_it_is_told_otherwise(monkeypatch):
    slept = []
    monkeypatch.setattr("headrace.scheduler.scheduler.time.sleep", slept.append)
    rig = Rig(num_pages=100)
    rig.inbox.send(SLOW_DOWN.message(1, SlowDownBody(0.25)))
    rig.turn()
    assert slept == []
    rig.add("a", prompt(10), 4, ignore_eos=True)
    rig.drain()
    assert set(slept) == {0.25}
    assert len(slept) == rig.scheduler.state.counters.num_steps
    rig.inbox.send(SLOW_DOWN.message(2, SlowDownBody(None)))
    slept.clear()
    rig.add("b", prompt(10), 4, ignore_eos=True)
    rig.drain()

    assert slept == []
    assert rig.reply(SLOW_DOWN, 2) == "full speed"


def test_a_scheduler_has_the_work_of_every_operation_and_refuses_what_is_none():
    rig = Rig(num_pages=100)
    for operation in OPERATIONS.values():
        if operation.at == "scheduler":
            hints = get_type_hints(getattr(Operations, operation.name))
            assert (hints["request"], hints["return"]) == (operation.request, operation.reply), operation.name
    rig.inbox.send(OperationReq(1, "no_such_operation", b""))
    rig.inbox.send(OperationReq(2, "cache_tree", b"\xc1"))
    rig.inbox.send(OperationReq(3, "cache_tree", msgspec.msgpack.encode({"max_depth": 0})))
    rig.turn()

    faults = {message.id: message.fault for message in rig.back.messages if isinstance(message, OperationReply)}
    assert {faults[number].kind for number in (1, 2, 3)} == {"RequestError"}
    assert faults[3].param == "max_depth"


def test_a_fault_at_admission_ends_that_request_alone():
    rig = Rig(num_pages=100)
    rig.inbox.send(FaultReq("admission", "raise", "bad"))
    rig.add("bad", prompt(5), **LONG)
    rig.add("good", prompt(6), **LONG)
    rig.drain()

    assert rig.finish["bad"].status_code == 500
    assert rig.finish["bad"].message == "internal error"
    assert rig.finish["good"].type == "length"


@pytest.mark.parametrize("guesses", [0, 3])
def test_a_fault_reaches_the_worker_once_with_the_step_that_gives_its_token(guesses: int, monkeypatch):
    rig = Rig(num_pages=100)
    rig.worker.guesses = lambda step, row: (guesses, guesses)
    plans, submit = [], rig.worker.submit
    monkeypatch.setattr(rig.worker, "submit", lambda plan: (plans.append(plan), submit(plan)))
    rig.inbox.send(FaultReq("forward", "sleep", "a", at_token=5))
    rig.add("a", prompt(7), **LONG)
    rig.drain()

    (at,) = [index for index, plan in enumerate(plans) if plan.faults]
    assert int(plans[at].starts[0] + plans[at].counts[0]) == 7 + 5
    # Which token a step with drafts gives is not known before, so there are none while a fault waits.
    assert [int(plan.num_logits.max()) for plan in plans[: at + 1]] == [1] * (at + 1)
    assert max(int(plan.num_logits.max()) for plan in plans[at + 1 :]) == (4 if guesses else 1)


def test_token_ids_outside_the_vocabulary_never_reach_the_worker():
    rig = Rig(num_pages=100)
    for rid, ids in (("high", [0, 2]), ("negative", [-1]), ("empty", [])):
        rig.add(rid, ids)
    rig.drain()

    assert {f.status_code for f in rig.finish.values()} == {400}
    assert rig.worker.num_computed == 0


def test_a_rid_may_be_used_again_once_it_has_ended():
    rig = Rig(num_pages=100)
    rig.add("a", prompt(5), 3)
    rig.drain()
    del rig.finish["a"], rig.ids["a"]
    rig.add("a", prompt(6), 3)
    rig.drain()

    assert rig.ids["a"] == expected_outputs(prompt(6), 3, 9)


def test_a_batch_message_is_taken_whole_and_shutdown_ends_the_loop():
    rig = Rig(num_pages=100)
    rig.add("a", prompt(5), 3)
    rig.add("b", prompt(6), 3)
    both = BatchTokenizedGenerateReqInput(tuple(rig.inbox.messages))
    rig.inbox.messages.clear()
    rig.inbox.send(both)
    rig.drain()
    rig.inbox.send(ShutdownReq())
    rig.scheduler.run()

    assert set(rig.finish) == {"a", "b"}
    assert rig.worker.closed


def test_wrong_accounting_at_idle_is_logged_counted_and_repaired(caplog):
    rig = Rig(num_pages=50)
    rig.add("a", prompt(5), 3)
    rig.drain()
    rig.kv.parts[0].allocator.allocate(2)  # a leak
    rig.add("b", prompt(6), 3)
    rig.drain()

    assert rig.state.counters.memory_repairs == 1
    assert "memory accounting is inconsistent" in caplog.text
    assert rig.finish["b"].type == "length"
    rig.kv.flush()
    assert rig.kv.state().free_tokens == 50


def test_a_stop_string_check_that_breaks_ends_its_request_alone():
    class Broken:
        def push(self, token_id):
            raise RuntimeError("cannot decode")

    rig = Rig(num_pages=200)
    rig.scheduler.stop_checkers = lambda request: Broken()
    sampling = ResolvedSamplingParams(max_new_tokens=9, seed=0, ignore_eos=True, stop=("x",))
    content = PromptContent(np.array(prompt(6), np.int32).tobytes())
    rig.inbox.send(TokenizedGenerateReqInput("bad", content, SampleTask(sampling)))
    rig.add("good", prompt(7, start=3), **LONG)
    rig.drain()

    assert (rig.finish["bad"].status_code, rig.finish["bad"].message) == (500, "internal error")
    assert rig.finish["good"].type == "length"
    rig.check_idle()
