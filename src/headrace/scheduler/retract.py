"""Running requests that give way: back to the queue when the pool is full, a more important one comes, or generation pauses; or to their end.

Retraction: their outputs are kept; their KV is computed again later.

Preemption, each request at most MAX_PREEMPTIONS times:
- by a waiting request of much higher priority (--enable-priority-preemption): it uses the priorities that clients gave, without ageing, and a
  difference of at least the threshold, so that of two requests only one can ever displace the other; and only requests of the same tenant are.
- by a tenant that waits and has less than its share of places and of the KV cache (`fairness.Shares`): the youngest requests of those that have
  more. None falls below its own share of places by that, so two tenants do not displace one another by turns.

Draining: every request keeps to one version of the weights, and all samples of a prompt to the one that the first of them started with. While the
gate drains, the planner admits only such samples; once none is left, an operation such as a weight update may take effect.

Runs in the scheduler's thread.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from headrace.log import get_logger
from headrace.messages.outputs import FinishReason
from headrace.scheduler.request import Req
from headrace.scheduler.state import SchedulerState
from headrace.scheduler.waiting import effective_priority

logger = get_logger(__name__)

MAX_PREEMPTIONS = 3
"""A request that has been displaced this many times keeps its place."""

MOST_TRIED = 4
"""So many tenants below their shares, the next ones, are looked at for one that others can make way for."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """`first` is to run now, in place of `victims` (least important first). for_tenant: so are others of its tenant, for a place each."""

    first: Req
    victims: tuple[Req, ...]
    for_tenant: bool = False


def make_room(state: SchedulerState, wanting: Req) -> bool:
    """Retract one request to free pages for `wanting`. No step in flight may use a request of its part of the KV cache.

    The victim is the least important running request of the part, so that the oldest always progresses: of a tenant above its share of the KV cache,
    if one is (unless it was retracted MAX_PREEMPTIONS times), then of the lowest priority, then the latest. It may be `wanting` itself; if that is
    alone, pins give way to it, one at a time, and without any it can never fit and ends here.
    Returns False when `wanting` was retracted or has ended.
    """
    candidates = [req for req in state.running if req.finish is None and req.seq >= 0 and req.part == wanting.part]
    if len(candidates) == 1 and state.pins.give_way(wanting.part):
        return True
    if len(candidates) == 1:
        total = state.kv.part_tokens
        wanting.finish = FinishReason(
            "abort",
            message=f"the KV cache holds {total} tokens and this request alone needs more ({wanting.num_tokens} so far)",
            status_code=400,
        )
        state.ended.append(wanting)
        return False
    above = _above_share(state, wanting.part)

    def importance(req: Req) -> tuple[bool, float, int]:
        stays = req.asked.tenant not in above or req.num_retractions >= MAX_PREEMPTIONS
        return stays, effective_priority(req, req.arrived_s, 0.0), -req.order

    victim = min(candidates, key=importance)
    _retract(state, victim)
    state.ratio.retracted(req for req in candidates if req is not victim)
    return victim is not wanting


def preempt(state: SchedulerState, victims: Sequence[Req]) -> None:
    """Retract these requests for a more important one. No step in flight may use them."""
    for req in victims:
        if req.seq >= 0:
            _retract(state, req)
            req.num_preemptions += 1


def retract_all(state: SchedulerState, keep_kv: bool) -> None:
    """Retract every running request. No step may be in flight.

    keep_kv: their KV stays in the cache while there is room; otherwise it is dropped, and they compute it again.
    """
    assert not state.in_flight, "a request in flight cannot be retracted"
    for req in state.running[:]:
        req.keep_kv &= keep_kv
        _retract(state, req)
        req.keep_kv = True


def _retract(state: SchedulerState, req: Req) -> None:
    assert req.num_in_flight == 0, (req.rid, req.num_in_flight)
    # Its KV goes into the cache: if the room is not needed after all, it is found there again.
    state.kv.release(req)
    state.encodings.release(req)
    state.running.remove(req)
    state.fair_share.come_back(req, state.waiting.tenants)
    state.waiting.add(req)
    req.num_retractions += 1
    req.note("retracted", state.now_s, req.num_outputs)
    state.moved[req.rid] = False
    state.counters.num_retracted += 1
    logger.debug("retracted %s after %d output tokens", req.rid, req.num_outputs)


def choose_victims(state: SchedulerState, next_of: Callable[[str], Req]) -> Preemption | None:
    """The victims for the most important waiting request, or for a tenant below its share; None when there are none, or none are needed.

    None are displaced in vain: if even all candidates together would not free enough, they stay. next_of: the next request of a tenant that waits.
    """
    if not state.waiting or state.gate.draining:
        return None
    if (threshold := state.config.preemption_threshold) > 0:
        first = min(state.waiting.heads(), key=lambda r: (-r.asked.priority, r.order))
        candidates = [req for req in state.running if _may_take_place(first, req, threshold)]
        candidates.sort(key=_least_important)
        if candidates and (victims := _fewest_victims(state, first, candidates)):
            return Preemption(first, victims)
    if not state.shares.are_several:
        return None
    below = islice(filter(state.shares.is_below, state.fair_share.by_turns(state.waiting.tenants)), MOST_TRIED)
    return next(filter(None, (_way_for_tenant(state, tenant, next_of) for tenant in below)), None)


def _way_for_tenant(state: SchedulerState, tenant: str, next_of: Callable[[str], Req]) -> Preemption | None:
    """For all that waits of a tenant, as far as its share of places goes, if the first of it can be admitted then."""
    candidates = sorted(_more_than_share(state, tenant), key=_least_important)
    if not candidates:
        return None
    first = next_of(tenant)
    victims = _fewest_victims(state, first, candidates)
    if victims is None:
        return None
    missing = min(state.waiting.num_of(tenant), state.shares.num_left(tenant)) - state.shares.num_free
    victims = max(victims, tuple(candidates[: max(0, missing)]), key=len)
    return Preemption(first, victims, for_tenant=True) if victims else None


def _least_important(req: Req) -> tuple[int, int]:
    return req.asked.priority, -req.order


def _fewest_victims(state: SchedulerState, first: Req, candidates: list[Req]) -> tuple[Req, ...] | None:
    """Over all parts of the KV cache, see `_victims`."""
    parts = range(len(state.kv.parts))
    possible = [victims for part in parts if (victims := _victims(state, first, candidates, part)) is not None]
    return min(possible, key=len, default=None)


def _more_than_share(state: SchedulerState, wanting: str) -> list[Req]:
    """Of every other tenant that got no less service the youngest requests that it runs beyond its share of places or of the KV cache, if `wanting`,
    which waits, is below its own."""
    above = _above_share(state)
    if wanting in above:
        return []
    found: list[Req] = []
    holders = _holders(state.running)
    num_left = Counter(req.asked.tenant for req in state.running if req.finish is None)
    for req in sorted(state.running, key=lambda r: -r.order):
        tenant = req.asked.tenant
        if tenant in ("", wanting) or req.finish is not None or req.num_preemptions >= MAX_PREEMPTIONS:
            continue
        if state.fair_share.has_had_more(wanting, tenant):
            continue
        if num_left[tenant] > state.shares.places(tenant) or above.get(tenant, 0) > 0:
            found.append(req)
            num_left[tenant] -= 1
            if tenant in above:
                above[tenant] -= _freed_tokens(state, holders, req)
    return found


def _above_share(state: SchedulerState, part: int | None = None) -> dict[str, int]:
    """How many tokens those have too many who have more than their share of the KV cache, or of a part of it."""
    if not state.shares.are_several:
        return {}
    pages: defaultdict[str, set[int]] = defaultdict(set)
    for req in state.running:
        if req.finish is None and req.asked.tenant and part in (None, req.part):
            pages[req.asked.tenant].update(req.pages)  # those that several samples have count once
    total = state.kv.total_tokens if part is None else state.kv.part_tokens
    held = {tenant: len(own) * state.kv.page_size for tenant, own in pages.items()}
    too_many = {tenant: count - int(state.shares.part(tenant) * total) for tenant, count in held.items()}
    return {tenant: count for tenant, count in too_many.items() if count > 0}


def _holders(running: Iterable[Req]) -> Counter[int]:
    """Of each page, the number of requests that have it."""
    return Counter(chain.from_iterable(req.pages for req in running if req.finish is None))


def _freed_tokens(state: SchedulerState, holders: Counter[int], req: Req) -> int:
    """Tokens of the pages that nobody has any more without the request, which is taken out of `holders`."""
    holders.subtract(req.pages)
    return sum(holders[page] == 0 for page in req.pages) * state.kv.page_size


def _victims(state: SchedulerState, first: Req, candidates: list[Req], part: int) -> tuple[Req, ...] | None:
    """Those who have to go so that `first` can be admitted to a part of the KV cache; None: not even all of them would be enough."""
    places, tokens = _missing(state, first, part)
    victims: list[Req] = []
    holders = _holders(state.running) if tokens > 0 else Counter[int]()
    # Tokens are freed only by those of the part, a place by anyone.
    for req in [req for req in candidates if req.part == part] if tokens > 0 else candidates:
        if places <= 0 and tokens <= 0:
            break
        victims.append(req)
        places -= 1
        tokens -= _freed_tokens(state, holders, req) + expected_tokens(state, req)
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
    places = 1 - (state.num_places - len(running))
    match = kv.match(first, part)
    needed = expected_tokens(state, first, match.num_tokens)
    room = kv.available_tokens(part) - sum(expected_tokens(state, req) for req in running if req.part == part)
    kv.unpin(match, part)
    return places, needed - room


def expected_tokens(state: SchedulerState, req: Req, num_cached: int = 0) -> int:
    return state.ratio.expected_tokens(req, state.kv.page_size, num_cached)


def has_begun(state: SchedulerState, req: Req) -> bool:
    """Whether it, or another sample of its prompt, has taken part in a step, here or in a scheduler that has died."""
    return req.has_begun or req.asked.attempt > 0 or state.groups.has_begun(req)


def is_drained(state: SchedulerState) -> bool:
    """Whether no step is in flight and no request that has begun will take another: all have ended, or steps are held."""
    if state.in_flight:
        return False
    if state.gate.holds:
        return True
    return not (state.running or any(has_begun(state, req) for req in chain(state.waiting, state.not_ready)))
