"""Weighted fair sharing between API keys with waiting requests.

The Virtual Token Counter of Sheng et al. 2024, "Fairness in Serving Large Language Models" (arXiv:2401.00588), with weights: each
tenant has a counter of the service it received (computed prompt tokens, and output tokens, which cost more), divided by its weight;
the waiting tenant with the smallest counter goes next. When a tenant starts to wait again, its counter is raised to the smallest one of
those that wait, or of the last one that did, so idle time earns no credit. Within a tenant the queue's policy decides. No slot is kept
empty for a share.

Owns the counters. Does not read the clock; runs in the scheduler's thread.
"""

import heapq
from collections.abc import Callable, Collection, Iterator

from headrace.scheduler.request import Req

PROMPT_COST = 1.0
OUTPUT_COST = 2.0
"""Cost of an output token, in prompt tokens; the ratio of the paper."""

MAX_TENANTS = 10_000
"""Most counters to keep; beyond this (or twice the number of tenants that wait), those of tenants without waiting requests are dropped."""


class FairShare:
    """Service received per tenant, and the resulting order. With one tenant it has no effect."""

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        self._max_counters = MAX_TENANTS
        self._last_admitted = ""
        # All tenants that wait, and perhaps some that did, each once with its counter or an earlier, smaller value of it.
        self._by_service: list[tuple[float, str]] = []
        self._in_heap: set[str] = set()

    def arrive(self, req: Req, waiting: Collection[str]) -> None:
        """A request is about to wait: raise its tenant's counter, unless the tenant is already among the `waiting`."""
        tenant = req.asked.tenant
        if tenant not in waiting:
            self._service[tenant] = max(self._service.get(tenant, 0.0), self._least(waiting))
            self._put_in_heap(tenant)
        if len(self._service) > self._max_counters:
            self._drop_all_but({*waiting, tenant, self._last_admitted})

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
