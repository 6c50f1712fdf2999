"""Order of one key's waiting requests. Pure functions of its lanes (`waiting.py`) and the clock.

Each returns a lazy iterator, since a plan takes only a few of possibly thousands of requests.
"""

import heapq
from collections.abc import Callable, Collection, Iterator

from headrace.scheduler.request import Req
from headrace.scheduler.waiting import Lane

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


def priority(lanes: Collection[Lane], now_s: float, ageing_s: float) -> Iterator[Req]:
    """Highest effective priority first, then arrival."""
    return heapq.merge(*lanes, key=lambda r: (-effective_priority(r, now_s, ageing_s), r.order))
