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
"""Most counters to keep; beyond this, counters of tenants without waiting requests are dropped."""


class FairShare:
    """Service received per tenant, and the resulting order. With one tenant it has no effect."""

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        self._last_admitted = ""

    def arrive(self, req: Req, waiting: Collection[str]) -> None:
        """A request is about to wait: raise its tenant's counter, unless the tenant is already among the `waiting`."""
        tenant = req.asked.tenant
        if tenant in self._service and len(self._service) < 2:
            return
        if tenant not in waiting:
            last = self._service.get(self._last_admitted, 0.0)
            least = min((self._service[name] for name in waiting), default=last)
            self._service[tenant] = max(self._service.get(tenant, 0.0), least)
        if len(self._service) > MAX_TENANTS:
            kept = {*waiting, tenant, self._last_admitted}
            self._service = {name: cost for name, cost in self._service.items() if name in kept}

    def order(self, tenants: Collection[str], own_order: Callable[[str], Iterator[Req]]) -> Iterator[Req]:
        """What waits, with the tenants taking turns by what they got, as if admitted one by one.

        own_order: of a tenant's requests. Looks no further than it is asked.
        """
        if len(tenants) == 1:
            yield from own_order(next(iter(tenants)))
            return
        own = {tenant: own_order(tenant) for tenant in tenants}
        turns = [(self._service[tenant], tenant) for tenant in tenants]
        heapq.heapify(turns)
        while turns:
            service, tenant = turns[0]
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
        """Charge for `num_tokens` output tokens."""
        self._charge(req, OUTPUT_COST * num_tokens)

    def _charge(self, req: Req, cost: float) -> None:
        tenant = req.asked.tenant
        self._service[tenant] = self._service.get(tenant, 0.0) + cost / req.asked.weight
