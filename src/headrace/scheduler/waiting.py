"""The requests that wait, in order of arrival, and how many of each key.

Runs in the scheduler's thread. The work of adding and removing does not grow with the queue but for moving its list.
"""

from bisect import bisect_left
from collections.abc import Iterator

from headrace.scheduler.request import Req


class WaitingQueue:
    """Ordered by `Req.order`: a request that was taken back comes where it was before.

    num_by_tenant: waiting requests of each key that has any.
    """

    def __init__(self) -> None:
        self._requests: list[Req] = []
        self.num_by_tenant: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._requests)

    def __contains__(self, req: object) -> bool:
        if not isinstance(req, Req):
            return False
        index = self._index(req)
        return index < len(self._requests) and self._requests[index] is req

    def add(self, req: Req) -> None:
        """It begins to wait, or to wait again."""
        self._requests.insert(self._index(req), req)
        tenant = req.asked.tenant
        self.num_by_tenant[tenant] = self.num_by_tenant.get(tenant, 0) + 1

    def remove(self, req: Req) -> None:
        """It waits no more. It did."""
        assert req in self, req.rid
        del self._requests[self._index(req)]
        tenant = req.asked.tenant
        self.num_by_tenant[tenant] -= 1
        if self.num_by_tenant[tenant] == 0:
            del self.num_by_tenant[tenant]

    def _index(self, req: Req) -> int:
        """Where it is, or where it belongs."""
        requests = self._requests
        if not requests or requests[-1].order < req.order:
            return len(requests)
        return bisect_left(requests, req.order, key=lambda r: r.order)
