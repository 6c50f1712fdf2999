"""Order of the waiting queue. Pure functions of the queue and the clock."""

from collections.abc import Callable, Collection

from headrace.scheduler.request import Req

LPM_MAX_QUEUE = 128
"""With more waiting requests than this, matching all of them costs more than it gains: arrival order."""

LPM_MAX_WAIT_S = 5.0
"""Longest-prefix order may pass a request over for so long; then it goes first."""


def fcfs(waiting: Collection[Req], now_s: float) -> list[Req]:
    """Arrival order; retracted requests keep their first arrival. The queue is kept in this order."""
    return list(waiting)


def lpm(waiting: Collection[Req], now_s: float, cached_tokens: Callable[[Req], int]) -> list[Req]:
    """Longest cached prefix first; who has waited longer than LPM_MAX_WAIT_S goes before, in arrival order."""
    if len(waiting) > LPM_MAX_QUEUE:
        return fcfs(waiting, now_s)

    def key(req: Req) -> tuple[int, int, int]:
        starving = now_s - req.arrived_s > LPM_MAX_WAIT_S
        return (0, 0, req.order) if starving else (1, -cached_tokens(req), req.order)

    return sorted(waiting, key=key)


def effective_priority(req: Req, now_s: float, ageing_s: float) -> float:
    """Priority, raised by one for every `ageing_s` seconds of waiting; ageing_s <= 0: never raised."""
    waited = int((now_s - req.arrived_s) / ageing_s) if ageing_s > 0 else 0
    return req.asked.priority + waited


def priority(waiting: Collection[Req], now_s: float, ageing_s: float) -> list[Req]:
    """Highest effective priority first, then arrival."""
    return sorted(waiting, key=lambda r: (-effective_priority(r, now_s, ageing_s), r.order))
