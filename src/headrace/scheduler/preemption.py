"""Running requests that make way for a waiting one of a much higher priority (--enable-priority-preemption).

Owns the choice of who makes way for whom. Does not take anything back (`retract.py` does, when no step uses it any more). Runs in the
scheduler's thread.

What keeps it bounded: priorities are those that clients gave, without ageing, and the difference is at least the threshold, so that of two
requests only one can ever take the other's place; only requests of the same key make way; and each at most MAX_PREEMPTIONS times.
"""

from dataclasses import dataclass

from headrace.scheduler.request import Req
from headrace.scheduler.state import SchedulerState

MAX_PREEMPTIONS = 3
"""After so many times a request keeps its place."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """`first` is to run at once, in the place of `victims` (least important first)."""

    first: Req
    victims: tuple[Req, ...]


def choose(state: SchedulerState) -> Preemption | None:
    """Who makes way for the most important waiting request; None when nobody should, or nobody needs to.

    Nobody makes way in vain: when even all who could would not be enough, they stay.
    """
    threshold = state.config.preemption_threshold
    if threshold <= 0 or not state.waiting or state.gate.draining:
        return None
    first = min(state.waiting.heads(), key=lambda r: (-r.asked.priority, r.order))
    candidates = [req for req in state.running if _may_take_place(first, req, threshold)]
    if not candidates:
        return None
    places, tokens = _missing(state, first)
    victims: list[Req] = []
    for req in sorted(candidates, key=lambda r: (r.asked.priority, -r.order)):
        if places <= 0 and tokens <= 0:
            break
        victims.append(req)
        places -= 1
        # At most: others may lease a part of its pages.
        tokens -= len(req.pages) * state.kv.page_size + _expected_tokens(state, req)
    if places > 0 or tokens > 0 or not victims:
        return None
    return Preemption(first, tuple(victims))


def _may_take_place(first: Req, req: Req, threshold: int) -> bool:
    return (
        req.finish is None
        and req.num_preemptions < MAX_PREEMPTIONS
        and req.asked.tenant == first.asked.tenant
        and first.asked.priority - req.asked.priority >= threshold
    )


def _missing(state: SchedulerState, first: Req) -> tuple[int, int]:
    """Places and tokens that admitting `first` takes beyond what there is; <= 0: enough."""
    kv = state.kv
    # Those that have ended leave their places when no step uses them any more.
    running = [req for req in state.running if req.finish is None]
    places = 1 - (min(kv.max_seqs, state.config.max_running) - len(running))
    match = kv.match(first)
    first.num_scheduled = match.num_tokens
    needed = _expected_tokens(state, first)
    room = kv.available_tokens - sum(_expected_tokens(state, req) for req in running)
    kv.cache.release(match.lease)
    first.num_scheduled = 0
    return places, needed - room


def _expected_tokens(state: SchedulerState, req: Req) -> int:
    return state.ratio.expected_tokens(req, state.kv.page_size)
