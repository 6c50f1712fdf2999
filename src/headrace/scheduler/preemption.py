"""Preemption of running requests by a waiting one of much higher priority (--enable-priority-preemption).

Owns the choice of the victims. Does not retract them (`retract.py` does, when no step uses them any more). Runs in the scheduler's thread.

Preemption is bounded: it uses the priorities that clients gave, without ageing, and a difference of at least the threshold, so that of two
requests only one can ever displace the other; only requests of the same API key are displaced; and each at most MAX_PREEMPTIONS times.
"""

from dataclasses import dataclass

from headrace.scheduler.request import Req
from headrace.scheduler.state import SchedulerState

MAX_PREEMPTIONS = 3
"""A request that has been displaced this many times keeps its place."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """`first` is to run now, in place of `victims` (least important first)."""

    first: Req
    victims: tuple[Req, ...]


def choose(state: SchedulerState) -> Preemption | None:
    """The victims for the most important waiting request; None when there are none, or none are needed.

    None are displaced in vain: if even all candidates together would not free enough, they stay.
    """
    threshold = state.config.preemption_threshold
    if threshold <= 0 or not state.waiting or state.gate.draining:
        return None
    first = min(state.waiting.heads(), key=lambda r: (-r.asked.priority, r.order))
    candidates = [req for req in state.running if _may_take_place(first, req, threshold)]
    if not candidates:
        return None
    candidates.sort(key=lambda r: (r.asked.priority, -r.order))
    parts = range(len(state.kv.parts))
    possible = [victims for part in parts if (victims := _victims(state, first, candidates, part)) is not None]
    fewest = min(possible, key=len, default=())
    return Preemption(first, fewest) if fewest else None


def _victims(state: SchedulerState, first: Req, candidates: list[Req], part: int) -> tuple[Req, ...] | None:
    """Those who have to go so that `first` can be admitted to a part of the KV cache; None: not even all of them would be enough."""
    places, tokens = _missing(state, first, part)
    victims: list[Req] = []
    # Tokens are freed only by those of the part, a place by anyone.
    for req in [req for req in candidates if req.part == part] if tokens > 0 else candidates:
        if places <= 0 and tokens <= 0:
            break
        victims.append(req)
        places -= 1
        # An upper bound: other requests may lease some of its pages.
        tokens -= len(req.pages) * state.kv.page_size + _expected_tokens(state, req)
    return tuple(victims) if places <= 0 and tokens <= 0 else None


def _may_take_place(first: Req, req: Req, threshold: int) -> bool:
    return (
        req.finish is None
        and req.num_preemptions < MAX_PREEMPTIONS
        and req.asked.tenant == first.asked.tenant
        and first.asked.priority - req.asked.priority >= threshold
    )


def _missing(state: SchedulerState, first: Req, part: int) -> tuple[int, int]:
    """Places and tokens that are missing to admit `first` to a part of the KV cache; <= 0: enough."""
    kv = state.kv
    # Requests that have ended free their places when no step uses them any more.
    running = [req for req in state.running if req.finish is None]
    places = 1 - (min(kv.max_seqs, state.config.max_running) - len(running))
    match = kv.match(first, part)
    needed = _expected_tokens(state, first, match.num_tokens)
    room = kv.available_tokens(part) - sum(_expected_tokens(state, req) for req in running if req.part == part)
    kv.unpin(match, part)
    return places, needed - room


def _expected_tokens(state: SchedulerState, req: Req, num_cached: int = 0) -> int:
    return state.ratio.expected_tokens(req, state.kv.page_size, num_cached)
