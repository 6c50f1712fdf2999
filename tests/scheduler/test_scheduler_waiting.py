"""The waiting queue against a plain list, and the order of admission against sorting all of it."""

import pytest
from fake_worker import Rig
from hypothesis import given
from hypothesis import strategies as st

from headrace.messages.requests import SampleTask, TokenizedGenerateReqInput
from headrace.sampling.params import ResolvedSamplingParams
from headrace.scheduler import planner, policy
from headrace.scheduler.fairness import FairShare
from headrace.scheduler.request import Req
from headrace.scheduler.waiting import WaitingQueue


def make(order: int, tenant: str = "", priority: int = 0, arrived_s: float = 0.0, num_tokens: int = 1) -> Req:
    sampling = ResolvedSamplingParams(max_new_tokens=1, seed=0)
    asked = TokenizedGenerateReqInput(
        f"r{order}",
        bytes(4 * num_tokens),
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
            assert list(policy.fcfs(queue.lanes(tenant))) == [r for r in plain if r.asked.tenant == tenant]
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
        own.sort(key=lambda r: (-policy.effective_priority(r, now_s + 5, ageing_s), r.order))
        assert list(policy.priority(queue.lanes(tenant), now_s + 5, ageing_s)) == own


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

    assert list(fair_share.order(queue.tenants, lambda tenant: policy.fcfs(queue.lanes(tenant)))) == want


@pytest.mark.parametrize("name", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("num_tenants", [1, 3])
def test_a_plan_looks_at_no_more_requests_than_it_admits(name, num_tenants, monkeypatch):
    """Whatever the policy: the queue may be long, the requests that a plan looks at are few."""
    rig = Rig(num_pages=4000, max_running=4, chunk=64, step_tokens=64, radix=False, policy=name)
    for i in range(1000):
        rig.add(f"r{i}", [1, 0, 1], tenant="abc"[i % num_tenants], priority=i % 2, max_new_tokens=4)
    looked_at = []
    for module, function in ((policy, "effective_priority"), (planner, "_waits_for_prefix")):
        real = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *args, real=real: (looked_at.append(1), real(*args))[1])
    rig.turn()

    assert len(rig.scheduler.state.running) == 4
    assert len(looked_at) < 40
