"""The waiting queue against a plain list."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.messages.requests import SampleTask, TokenizedGenerateReqInput
from headrace.sampling.params import ResolvedSamplingParams
from headrace.scheduler.request import Req
from headrace.scheduler.waiting import WaitingQueue


def make(order: int) -> Req:
    sampling = ResolvedSamplingParams(max_new_tokens=1, seed=0)
    asked = TokenizedGenerateReqInput(f"r{order}", bytes(4), SampleTask(sampling), tenant="abc"[order % 3])
    return Req.from_input(asked, 0.0, order, frozenset())


@given(st.lists(st.integers(0, 9), max_size=40))
def test_it_is_a_list_sorted_by_arrival_that_counts_by_key(touched):
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
        assert list(queue) == plain
        assert len(queue) == len(plain)
        assert queue.num_by_tenant == Counter(r.asked.tenant for r in plain)
    assert make(3) not in queue  # another request of the same number is another
    assert "r3" not in queue
