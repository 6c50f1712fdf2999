"""Weighted fair sharing between tenants (API keys, or the addresses of clients without one): who goes next, and who has more than its share.

**Turns** of those that wait. The Virtual Token Counter of Sheng et al. 2024, "Fairness in Serving Large Language Models" (arXiv:2401.00588), with
weights: each tenant has a counter of the service it received (computed prompt tokens, and output tokens, which cost more), divided by its weight;
the waiting tenant with the smallest counter goes next. When a tenant starts to wait again, its counter is raised to the smallest one of those that
wait, or of the last one that did, so idle time earns no credit. Within a tenant the queue's policy decides.

**Shares** of the places of running samples and of the KV cache, in proportion to the weights of those that are present. They count only while
somebody waits: a tenant that is alone may have all. One that is above its share then gives way to one that is below and got no more service
(`retract.choose_victims`), and it may not take the places that others have used lately, up to a part of all: otherwise each of their requests would
have to set back another sample.

Owns the counters. Does not read the clock; runs in the scheduler's thread.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from headrace.scheduler.request import Req
from headrace.scheduler.waiting import WaitingQueue

PROMPT_COST = 1.0
OUTPUT_COST = 2.0
"""Cost of an output token, in prompt tokens; the ratio of the paper."""

MAX_TENANTS = 10_000
"""Most counters to keep; beyond this (or twice the number of tenants that wait or run), those of the others are dropped."""

WINDOW_S = 10.0
"""A tenant counts as present from when it runs or waits to the end of the next window of so many seconds."""

KEPT_PART = 16
"""At most one of so many places is kept free for those who used it lately."""


class FairShare:
    """Service received per tenant, and the resulting order. With one tenant it has no effect."""

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        self._max_counters = MAX_TENANTS
        self._last_admitted = ""
        # All tenants that wait, and perhaps some that did, each once with its counter or an earlier, smaller value of it.
        self._by_service: list[tuple[float, str]] = []
        self._in_heap: set[str] = set()

    def arrive(self, req: Req, waiting: Collection[str], running: Iterable[Req] = ()) -> None:
        """A request is about to wait: raise its tenant's counter, unless the tenant is already among the `waiting`. running: all that run."""
        tenant = req.asked.tenant
        if tenant not in waiting:
            self._service[tenant] = max(self._service.get(tenant, 0.0), self._least(waiting))
            self._put_in_heap(tenant)
        if len(self._service) > self._max_counters:
            self._drop_all_but({*waiting, tenant, self._last_admitted, *(one.asked.tenant for one in running)})

    def come_back(self, req: Req, waiting: Collection[str]) -> None:
        """A running request is about to wait again. Its tenant's counter stays as it is; if it was dropped, the tenant is like a new one."""
        if req.asked.tenant in self._service:
            self._put_in_heap(req.asked.tenant)
        else:
            self.arrive(req, waiting)

    def order(self, tenants: Collection[str], own_order: Callable[[str], Iterator[Req]]) -> Iterator[Req]:
        """What waits, with the tenants taking turns by what they got, as if admitted one by one.

        own_order: of a tenant's requests. Looks no further than it is asked.
        """
        if len(tenants) == 1:
            yield from own_order(next(iter(tenants)))
            return
        own: dict[str, Iterator[Req]] = {}
        turns = [(self._service[tenant], tenant) for tenant in tenants]
        heapq.heapify(turns)
        while turns:
            service, tenant = turns[0]
            if tenant not in own:
                own[tenant] = own_order(tenant)
            req = next(own[tenant], None)
            if req is None:
                heapq.heappop(turns)
                continue
            yield req
            heapq.heapreplace(turns, (service + PROMPT_COST * req.num_prompt_tokens / req.asked.weight, tenant))

    def by_turns(self, tenants: Collection[str]) -> Iterator[str]:
        """Those that wait, who got least first."""
        turns = [(self._service[tenant], tenant) for tenant in tenants]
        heapq.heapify(turns)
        while turns:
            yield heapq.heappop(turns)[1]

    def has_had_more(self, tenant: str, other: str) -> bool:
        """Whether it got more service, by its weight, than another one."""
        return self._service.get(tenant, 0.0) > self._service.get(other, 0.0)

    def charge_prompt(self, req: Req, num_tokens: int) -> None:
        """Charge for `num_tokens` prompt tokens that will be computed, at admission."""
        self._last_admitted = req.asked.tenant
        self._charge(req, PROMPT_COST * num_tokens)

    def charge_output(self, req: Req, num_tokens: int) -> None:
        self._charge(req, OUTPUT_COST * num_tokens)

    def _charge(self, req: Req, cost: float) -> None:
        tenant = req.asked.tenant
        self._service[tenant] = self._service.get(tenant, 0.0) + cost / req.asked.weight

    def _least(self, waiting: Collection[str]) -> float:
        """The smallest counter of those that wait, or the counter of the last one that was admitted."""
        heap = self._by_service
        while heap:
            service, tenant = heap[0]
            if tenant not in waiting:
                heapq.heappop(heap)
                self._in_heap.remove(tenant)
            elif service < self._service[tenant]:
                heapq.heapreplace(heap, (self._service[tenant], tenant))
            else:
                return service
        return self._service.get(self._last_admitted, 0.0)

    def _put_in_heap(self, tenant: str) -> None:
        if tenant not in self._in_heap:
            heapq.heappush(self._by_service, (self._service[tenant], tenant))
            self._in_heap.add(tenant)

    def _drop_all_but(self, kept: set[str]) -> None:
        """Drop the counters of other tenants. Done again only when there are twice as many as are left now."""
        self._service = {tenant: service for tenant, service in self._service.items() if tenant in kept}
        self._max_counters = max(MAX_TENANTS, 2 * len(self._service))
        self._by_service = [(service, tenant) for tenant, service in self._service.items()]
        heapq.heapify(self._by_service)
        self._in_heap = set(self._service)


@dataclass(slots=True)
class _Presence:
    """most: samples that ran or waited at a time, in this window and the one before."""

    weight: float
    most: int = 0
    most_before: int = 0

    @property
    def places(self) -> int:
        return max(self.most, self.most_before)


class Shares:
    """What each tenant that is present holds and may hold. The one without a name, the operator's and the server's own, is outside of them."""

    def __init__(self) -> None:
        self._present: dict[str, _Presence] = {}
        self._total_weight = 0.0
        self._num_places = 0
        self._num_wanted = 0  # of all, see `_wanted`
        self._window_end_s = 0.0
        self._held: Counter[str] = Counter()

    def look(self, running: Sequence[Req], waiting: WaitingQueue, num_places: int, now_s: float) -> None:
        """Count anew; at the begin of a plan in which somebody waits. num_places: samples that may run at a time."""
        self._num_places = num_places
        self._held = Counter(req.asked.tenant for req in running if req.finish is None)
        here = (self._held.keys() | waiting.tenants) - {""}
        if not self.are_several and len(here) <= 1 and here == self._present.keys():
            return
        if now_s >= self._window_end_s:
            is_next = now_s < self._window_end_s + WINDOW_S
            self._present = {
                name: _Presence(one.weight, 0, one.most) for name, one in self._present.items() if is_next and one.most
            }
            self._window_end_s = now_s + WINDOW_S
        for req in (*running, *waiting.heads()):
            tenant, weight = req.asked.tenant, req.asked.weight
            if tenant in self._present:
                self._present[tenant].weight = weight
            elif tenant in here:
                self._present[tenant] = _Presence(weight)
        for tenant in here:
            one = self._present[tenant]
            one.most = max(one.most, self._held[tenant] + waiting.num_of(tenant))
        self._total_weight = sum(one.weight for one in self._present.values())
        self._num_wanted = sum(map(self._wanted, self._present))

    @property
    def are_several(self) -> bool:
        return len(self._present) > 1

    def part(self, tenant: str) -> float:
        """Of what there is, the part that is its share."""
        return self._present[tenant].weight / self._total_weight

    def places(self, tenant: str) -> int:
        return max(1, int(self.part(tenant) * self._num_places))

    @property
    def num_free(self) -> int:
        return self._num_places - self._held.total()

    def num_left(self, tenant: str) -> int:
        """Of its share, the places that it does not hold."""
        return self.places(tenant) - self._held[tenant] if tenant else 0

    def is_below(self, tenant: str) -> bool:
        return self.num_left(tenant) > 0

    def begin(self, tenant: str) -> None:
        """One of its samples has got a place."""
        self._num_wanted -= self._wanted(tenant)
        self._held[tenant] += 1
        self._num_wanted += self._wanted(tenant)

    def may_take(self, tenant: str, num_free: int) -> bool:
        """Whether it may take one of the free places now."""
        if not tenant or not self.are_several:
            return num_free > 0
        kept = min(self._num_wanted - self._wanted(tenant), self._num_places // KEPT_PART)
        return num_free > kept or (num_free > 0 and self.is_below(tenant))

    def _wanted(self, tenant: str) -> int:
        """Of the places that it has used lately, within its share, those that it does not hold."""
        one = self._present.get(tenant)
        return 0 if one is None else max(0, min(self.places(tenant), one.places) - self._held[tenant])
