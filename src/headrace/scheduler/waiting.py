"""The waiting requests in lanes, one per API key and priority, each in order of arrival; and the policies, which order those of a key.

Within a lane the policies let no request overtake another, because the first one has waited longer. So the next request is the
best of the lanes' first ones, and the whole queue need not be sorted. Runs in the scheduler's thread. Adding and removing are a binary
search and a change of one lane's list. A policy gives a lazy iterator, since a plan takes only a few of possibly thousands of requests.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain

from headrace.scheduler.request import Req

Lane = Sequence[Req]
"""Waiting requests of one key and priority, by `Req.order`."""


class WaitingQueue:
    """Iterates over all waiting requests, lane by lane. A retracted request returns to its old position in its lane."""

    def __init__(self) -> None:
        self._lanes: dict[str, dict[int, list[Req]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Req]:
        return chain.from_iterable(lane for lanes in self._lanes.values() for lane in lanes.values())

    def __contains__(self, req: object) -> bool:
        if not isinstance(req, Req):
            return False
        lane = self._lane(req)
        index = _index(lane, req)
        return index < len(lane) and lane[index] is req

    @property
    def tenants(self) -> Collection[str]:
        return self._lanes.keys()

    def lanes(self, tenant: str) -> list[Lane]:
        """The lanes of one key. They change with the queue."""
        return list(self._lanes[tenant].values())

    def num_of(self, tenant: str) -> int:
        return sum(map(len, self._lanes.get(tenant, {}).values()))

    def heads(self) -> Iterator[Req]:
        return (lane[0] for lanes in self._lanes.values() for lane in lanes.values())

    def add(self, req: Req) -> None:
        lane = self._lanes.setdefault(req.asked.tenant, {}).setdefault(req.asked.priority, [])
        lane.insert(_index(lane, req), req)
        self._count += 1

    def remove(self, req: Req) -> None:
        assert req in self, req.rid
        lanes = self._lanes[req.asked.tenant]
        lane = lanes[req.asked.priority]
        del lane[_index(lane, req)]
        if not lane:
            del lanes[req.asked.priority]
        if not lanes:
            del self._lanes[req.asked.tenant]
        self._count -= 1

    def _lane(self, req: Req) -> Lane:
        return self._lanes.get(req.asked.tenant, {}).get(req.asked.priority, ())


def _index(lane: Lane, req: Req) -> int:
    """Its index, or the index where it belongs."""
    if not lane or lane[-1].order < req.order:
        return len(lane)
    return bisect_left(lane, req.order, key=lambda r: r.order)


LPM_MAX_QUEUE = 128
"""With more waiting requests than this, lpm falls back to arrival order: matching all of them costs more than it gains."""

LPM_MAX_WAIT_S = 5.0
"""lpm may pass over a request for this many seconds; after that it goes first."""


def fcfs(lanes: Collection[Lane]) -> Iterator[Req]:
    """Arrival order; retracted requests keep their first arrival."""
    return heapq.merge(*lanes, key=lambda r: r.order)


def lpm(lanes: Collection[Lane], now_s: float, cached_tokens: Callable[[Req], int]) -> Iterator[Req]:
    """Longest cached prefix first; requests that have waited longer than LPM_MAX_WAIT_S go before them, in arrival order."""

    def key(req: Req) -> tuple[int, int, int]:
        starving = now_s - req.arrived_s > LPM_MAX_WAIT_S
        return (0, 0, req.order) if starving else (1, -cached_tokens(req), req.order)

    return iter(sorted((req for lane in lanes for req in lane), key=key))


def effective_priority(req: Req, now_s: float, ageing_s: float) -> float:
    """Priority, raised by one for every `ageing_s` seconds of waiting; ageing_s <= 0: never raised."""
    waited = int((now_s - req.arrived_s) / ageing_s) if ageing_s > 0 else 0
    return req.asked.priority + waited


def by_priority(lanes: Collection[Lane], now_s: float, ageing_s: float) -> Iterator[Req]:
    """Highest effective priority first, then arrival."""
    return heapq.merge(*lanes, key=lambda r: (-effective_priority(r, now_s, ageing_s), r.order))
