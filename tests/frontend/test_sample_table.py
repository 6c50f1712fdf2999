"""The table of live samples: rids and names are in use once, a call enters whole or not at all, nothing is left behind."""

import pytest

from headrace.errors import CapacityError, ExecutionError, RequestError
from headrace.frontend.request_state import Adapter, CallState, ReqState
from headrace.frontend.sample_table import ALONE_S, MAX_GIVEN_BYTES, SampleQueue, SampleTable
from headrace.frontend.tenants import Tenant, TenantLimits


def make_table(num_slots=8, max_waiting=8):
    return SampleTable(SampleQueue(num_slots, max_waiting))


def make_call(*rids, names=(), tenant=None):
    """A call whose names stand for all of its samples."""
    call = CallState(stream=False, is_list=len(rids) > 1, token_text=None)
    call.tenant = tenant or Tenant(TenantLimits(name=""))
    scope = call.tenant.scope
    call.samples = [ReqState(scope + rid, rid, i, i == 0, call, 0.0) for i, rid in enumerate(rids)]
    for name in names:
        call.name(scope + name, call.samples)
    return call


def test_a_call_is_found_by_its_rids_and_names_until_its_last_sample_is_forgotten():
    table = make_table()
    call = make_call("c/0", "c/1", names=["c"])
    first, second = call.samples
    table.enter(call, "c", 0.0)

    assert table.find("", "c/1") == [second]
    assert table.find("", "c") == [first, second]
    assert table.find("", "d") == []
    table.leave(call, 1.0)
    assert table.forget(first, 1.0)
    assert not table.forget(first, 1.0)
    assert table.find("", "c") == [first, second], "the name is in use while one of its samples lives"
    assert not table.is_empty
    assert table.forget(second, 1.0)
    assert table.find("", "c") == []
    assert table.is_empty
    assert (table.queue.num_queued, table.queue.num_running) == (0, 0)


@pytest.mark.parametrize(
    "rids,names,shown",
    [(["a"], [], "a"), (["n"], [], "n"), (["b", "c"], ["a"], "a"), (["b", "c"], ["n"], "n"), (["b", "b"], [], "call")],
)
def test_a_rid_in_use_is_refused_and_changes_nothing(rids, names, shown):
    table = make_table()
    table.enter(make_call("a", "x", names=["n"]), "n", 0.0)
    before = dict(table.samples)

    with pytest.raises(RequestError, match=f"Duplicate request ID '{shown}'"):
        table.enter(make_call(*rids, names=names), "call", 0.0)

    assert table.samples == before
    assert table.queue.num_queued == 2


def test_keys_use_the_same_rids_beside_each_other():
    table = make_table()
    ann, bob = (Tenant(TenantLimits(name=name)) for name in ("ann", "bob"))
    calls = [make_call("r", tenant=tenant) for tenant in (ann, bob)]
    for call in calls:
        table.enter(call, "r", 0.0)

    assert table.find(ann.scope, "r") == calls[0].samples
    assert table.find("", "r") == table.find("", ann.scope + "r") == []
    assert table.scopes() == {ann.scope, bob.scope}
    with pytest.raises(RequestError, match="Duplicate request ID 'r'"):
        table.enter(make_call("r", tenant=ann), "r", 0.0)


@pytest.mark.parametrize("limits,status", [({}, 503), ({"max_queued": 1}, 429), ({"max_concurrent": 0}, 429)])
def test_a_call_for_which_there_is_no_room_changes_nothing(limits, status):
    table = make_table(num_slots=1, max_waiting=1)
    tenant = Tenant(TenantLimits(name="ann", **limits))
    call = make_call("a", "b", "c", tenant=tenant) if status == 503 else make_call("a", "b", tenant=tenant)

    with pytest.raises(CapacityError) as caught:
        table.enter(call, "a", 0.0)

    assert caught.value.status_code == status
    assert table.is_empty
    assert (table.queue.num_queued, tenant.num_live, tenant.num_queued) == (0, 0, 0)


def fill(table, turn, now_s, most=100):
    """How many samples more may queue for a client."""
    for number in range(most):
        call = make_call(f"{turn}/{now_s}/{number}")
        call.turn = turn
        try:
            table.enter(call, "", now_s)
        except CapacityError:
            return number
    return most


def test_a_client_without_a_key_leaves_room_for_those_with_one():
    table = SampleTable(SampleQueue(num_slots=10, max_waiting=90, has_keys=True))
    assert [fill(table, turn, 0.0) for turn in ("@192.0.2.7", "key", "")] == [80, 16, 4]


def test_clients_without_keys_leave_room_for_each_other_but_one_alone_may_have_all():
    table = make_table(num_slots=10, max_waiting=90)
    assert fill(table, "@a", 0.0) == 100
    assert fill(table, "@b", 1.0) == 0
    for sample in [*table.samples.values()][:50]:
        table.begin(sample, 2.0)
    table.queue.num_slots += 50  # as if those had left
    assert fill(table, "@a", 2.0) == 30
    assert fill(table, "@b", 3.0) == 16
    assert fill(table, "@b", 3.0 + ALONE_S) == 4


def test_a_sample_runs_from_its_first_token_and_is_counted_once():
    table = make_table()
    tenant = Tenant(TenantLimits(name="ann"))
    call = make_call("a", "b", tenant=tenant)
    table.enter(call, "a", 0.0)

    for _ in range(2):
        table.begin(call.samples[0], 1.0)

    assert (table.queue.num_running, table.queue.num_queued, tenant.num_queued) == (1, 1, 1)
    table.leave(call, 2.0)
    for sample in call.samples:
        table.forget(sample, 2.0)
    assert (table.queue.num_running, table.queue.num_queued) == (0, 0)
    assert (tenant.num_live, tenant.num_queued) == (0, 0)


async def test_a_failure_reaches_those_who_wait_only():
    table = make_table()
    waited, left = make_call("a"), make_call("b")
    for call in (waited, left):
        table.enter(call, "", 0.0)
    table.leave(left, 0.0)

    table.fail(ExecutionError("gone"))

    with pytest.raises(ExecutionError, match="gone"):
        await waited.next_news(None)
    assert left.error is None


def test_adapters_in_use_are_those_of_samples_that_run_and_of_those_that_wait():
    table = make_table()
    call = make_call("a", "b", "c", "d")
    table.enter(call, "call", 0.0)
    poet, cook = Adapter("poet", "p"), Adapter("cook", "c")
    for sample, adapter in zip(call.samples, (poet, poet, cook, None), strict=True):
        sample.adapter = adapter
    call.samples[0].runs = call.samples[3].runs = True

    assert table.adapters_in_use() == ({"poet"}, {"poet", "cook"})


def test_a_request_that_was_split_into_calls_is_found_by_its_name():
    table = make_table()
    first, second = make_call("r/0", "r/1"), make_call("r/2")
    for call in (first, second):
        table.enter(call, "any", 0.0)

    assert table.find("", "r") == [*first.samples, *second.samples]
    assert table.find("", "r/1") == [first.samples[1]]
    assert table.find("", "x") == []


def test_what_clients_gave_as_images_is_bounded_and_one_call_alone_may_give_more():
    table = make_table()
    calls = [make_call(rid) for rid in "abc"]
    for call in calls:
        table.enter(call, "call", 0.0)
    table.hold_given(calls[0], MAX_GIVEN_BYTES + 1)
    table.hold_given(calls[1], 0)  # a call that gives none is never refused
    with pytest.raises(CapacityError, match="take too much memory"):
        table.hold_given(calls[1], 1)
    table.leave(calls[1], 0.0)
    table.leave(calls[0], 0.0)
    table.hold_given(calls[2], MAX_GIVEN_BYTES - 1)
    table.hold_given(calls[2], 1)
    with pytest.raises(CapacityError):
        table.hold_given(calls[2], 1)
