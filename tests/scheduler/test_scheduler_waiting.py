"""The waiting queue against a plain list, and the order of admission against sorting all of it."""

from collections.abc import Iterator

import pytest
from fake_worker import Rig
from hypothesis import given
from hypothesis import strategies as st

from headrace.messages.requests import PromptContent, SampleTask, TokenizedGenerateReqInput
from headrace.sampling.params import ResolvedSamplingParams
from headrace.scheduler import fairness, planner, waiting
from headrace.scheduler.fairness import FairShare
from headrace.scheduler.request import Req
from headrace.scheduler.waiting import WaitingQueue


def make(order: int, tenant: str = "", priority: int = 0, arrived_s: float = 0.0, num_tokens: int = 1) -> Req:
    sampling = ResolvedSamplingParams(max_new_tokens=1, seed=0)
    asked = TokenizedGenerateReqInput(
        f"r{order}",
        PromptContent(bytes(4 * num_tokens)),
        SampleTask(sampling),
        tenant=tenant or "abc"[order % 3],
        priority=priority or order % 2,
    )
    return Req.from_input(asked, arrived_s, order, frozenset(), 1)


@given(st.lists(st.integers(0, 9), max_size=40))
def test_it_is_a_list_by_key_and_priority_sorted_by_arrival(touched):
    requests = [make(order) for order in range(10)]
    queue, plain = WaitingQueue(), []
    for order in touched:
        req = requests[order]
        assert (req in queue) == (req in plain)
        if req in plain:
            queue.remove(req)
            plain.remove(req)
        else:
            queue.add(req)
            plain.append(req)
        plain.sort(key=lambda r: r.order)
        assert sorted(queue, key=lambda r: r.order) == plain
        assert len(queue) == len(plain)
        assert set(queue.tenants) == {r.asked.tenant for r in plain}
        for tenant in queue.tenants:
            assert list(waiting.fcfs(queue.lanes(tenant))) == [r for r in plain if r.asked.tenant == tenant]
        assert set(queue.heads()) == {
            next(r for r in plain if (r.asked.tenant, r.asked.priority) == lane)
            for lane in {(r.asked.tenant, r.asked.priority) for r in plain}
        }
    assert make(3) not in queue  # another request of the same number is another
    assert "r3" not in queue


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(-2, 2), st.integers(0, 9)), max_size=30),
    st.sampled_from([0.0, 3.0]),
)
def test_priorities_are_ordered_as_if_all_were_sorted(arrivals, ageing_s):
    queue, plain, now_s = WaitingQueue(), [], 0.0
    for order, (tenant, priority, pause_s) in enumerate(arrivals):
        now_s += pause_s
        req = make(order, tenant, priority or 9, now_s)
        queue.add(req)
        plain.append(req)

    for tenant in queue.tenants:
        own = [r for r in plain if r.asked.tenant == tenant]
        own.sort(key=lambda r: (-waiting.effective_priority(r, now_s + 5, ageing_s), r.order))
        assert list(waiting.by_priority(queue.lanes(tenant), now_s + 5, ageing_s)) == own


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), min_size=1, max_size=30))
def test_keys_take_turns_by_what_they_got(arrivals):
    queue, fair_share = WaitingQueue(), FairShare()
    left: dict[str, list[Req]] = {}
    for order, (tenant, num_tokens) in enumerate(arrivals):
        req = make(order, tenant, num_tokens=num_tokens)
        fair_share.arrive(req, queue.tenants)
        queue.add(req)
        left.setdefault(tenant, []).append(req)
    got = dict.fromkeys(left, 0.0)
    want = []
    while any(left.values()):
        tenant = min((name for name in left if left[name]), key=lambda name: (got[name], name))
        want.append(left[tenant].pop(0))
        got[tenant] += want[-1].num_prompt_tokens

    assert list(fair_share.order(queue.tenants, lambda tenant: waiting.fcfs(queue.lanes(tenant)))) == want


class NeverListed(set[str]):
    """Tenants that may be looked up but not gone through."""

    def __iter__(self):
        raise AssertionError("goes through all tenants")


def test_the_arrival_of_a_key_does_not_look_at_all_that_wait():
    fair_share, waiting = FairShare(), NeverListed()
    for order in range(20):
        req = make(order, f"t{order}")
        fair_share.arrive(req, waiting)
        waiting.add(req.asked.tenant)
        if order % 3 == 0:
            fair_share.charge_prompt(req, order + 1)
            waiting.remove(req.asked.tenant)


ACTIONS = st.tuples(st.sampled_from(["arrive", "admit", "come back", "output"]), st.sampled_from("abcde"))


@given(st.lists(st.tuples(ACTIONS, st.integers(1, 5)), max_size=60))
def test_a_key_that_begins_to_wait_is_raised_to_the_least_of_those_that_wait(actions):
    """Against the definition: the smallest counter of those that wait, else that of the last one admitted."""
    fair_share, waiting = FairShare(), set()
    service: dict[str, float] = {}
    last = ""
    for order, ((action, tenant), cost) in enumerate(actions):
        req = make(order, tenant, num_tokens=cost)
        if action == "arrive":
            if tenant not in waiting:
                least = min((service[name] for name in waiting), default=service.get(last, 0.0))
                service[tenant] = max(service.get(tenant, 0.0), least)
            fair_share.arrive(req, waiting)
            waiting.add(tenant)
        elif action == "admit" and tenant in waiting:
            waiting.remove(tenant)
            fair_share.charge_prompt(req, cost)
            service[tenant] += cost
            last = tenant
        elif action == "come back" and tenant in service:
            fair_share.come_back(req, waiting)
            waiting.add(tenant)
        elif action == "output" and tenant in service:
            fair_share.charge_output(req, cost)
            service[tenant] += 2.0 * cost
        # Each key's first turn comes by its counter.
        turns = [r.asked.tenant for r in fair_share.order(waiting, lambda name: iter([make(0, name)]))]
        assert turns == sorted(waiting, key=lambda name: (service[name], name))


def test_a_plan_opens_only_the_queues_of_the_keys_that_it_reaches():
    fair_share, waiting, opened = FairShare(), set(), []
    for order, tenant in enumerate("abcd"):
        fair_share.arrive(make(order, tenant), waiting)
        waiting.add(tenant)

    def own_order(tenant: str) -> Iterator[Req]:
        opened.append(tenant)
        return iter([make(9, tenant)])

    order = fair_share.order(waiting, own_order)
    assert [next(order).asked.tenant for _ in range(2)] == opened == ["a", "b"]


def test_counters_of_keys_that_do_not_wait_are_dropped_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(fairness, "MAX_TENANTS", 4)
    fair_share, waiting = FairShare(), set()
    for order in range(3):
        fair_share.arrive(make(order, f"waits{order}"), waiting)
        waiting.add(f"waits{order}")
    for order in range(50):
        fair_share.arrive(make(order, f"gone{order}"), waiting)

    # No more than twice those that wait, and one; those that wait are all there.
    assert len(fair_share._service) <= 2 * (3 + 1) + 1
    assert len(list(fair_share.order(waiting, lambda name: iter([make(0, name)])))) == 3


def test_who_runs_keeps_its_counter_however_many_others_come(monkeypatch):
    monkeypatch.setattr(fairness, "MAX_TENANTS", 4)
    fair_share, runs = FairShare(), make(0, "runs")
    fair_share.arrive(runs, ())
    fair_share.charge_output(runs, 1000)
    for order in range(50):
        fair_share.arrive(make(order, f"gone{order}"), (), [runs])
    fair_share.come_back(runs, ())
    assert list(fair_share.by_turns({"runs", "gone49"})) == ["gone49", "runs"]
    assert fair_share.has_had_more("runs", "gone49")


def test_a_request_waits_again_after_the_counter_of_its_key_was_dropped(monkeypatch):
    monkeypatch.setattr(fairness, "MAX_TENANTS", 2)
    fair_share = FairShare()
    runs = make(0, "runs")
    fair_share.arrive(runs, ())
    for order in range(4):
        fair_share.arrive(make(order, f"gone{order}"), ())
    fair_share.come_back(runs, ())

    assert list(fair_share.order({"runs", "gone3"}, lambda name: iter([make(0, name)])))


@pytest.mark.parametrize("name", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("num_tenants", [1, 3])
def test_a_plan_looks_at_no_more_requests_than_it_admits(name, num_tenants, monkeypatch):
    """Whatever the policy: the queue may be long, the requests that a plan looks at are few."""
    rig = Rig(num_pages=4000, max_running=4, chunk=64, step_tokens=64, radix=False, policy=name)
    for i in range(1000):
        rig.add(f"r{i}", [1, 0, 1], tenant="abc"[i % num_tenants], priority=i % 2, max_new_tokens=4)
    looked_at = []
    for module, function in ((waiting, "effective_priority"), (planner, "_waits_for_prefix")):
        real = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *args, real=real: (looked_at.append(1), real(*args))[1])
    rig.turn()

    assert len(rig.scheduler.state.running) == 4
    assert len(looked_at) < 40
