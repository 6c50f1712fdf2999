"""Takes running requests back to the queue, because the pool is full, a more important one comes, or generation pauses. Their outputs are
kept; their KV is computed again later."""

from collections.abc import Sequence

from headrace.log import get_logger
from headrace.messages.outputs import FinishReason
from headrace.scheduler.policy import effective_priority
from headrace.scheduler.request import Req
from headrace.scheduler.state import SchedulerState

logger = get_logger(__name__)


def make_room(state: SchedulerState, wanting: Req) -> bool:
    """Retract one request so that `wanting` may grow; called with no step in flight.

    The victim is the least important of the running ones (lowest priority, then latest arrival): the oldest always
    progresses. That may be `wanting` itself, unless it is alone: then it can never fit and ends here.
    Returns False when `wanting` is out (retracted or ended).
    """
    assert not state.in_flight, "a request in flight cannot be retracted"
    candidates = [req for req in state.running if req.finish is None and req.seq >= 0]
    if len(candidates) == 1:
        total = state.kv.total_tokens
        wanting.finish = FinishReason(
            "abort",
            message=f"the KV cache holds {total} tokens and this request alone needs more ({wanting.num_tokens} so far)",
            status_code=400,
        )
        state.ended.append(wanting)
        return False
    victim = min(candidates, key=lambda r: (effective_priority(r, r.arrived_s, 0.0), -r.order))
    _retract(state, victim)
    state.ratio.retracted(req for req in candidates if req is not victim)
    return victim is not wanting


def preempt(state: SchedulerState, victims: Sequence[Req]) -> None:
    """Take these back because a more important request needs their place; called when no step in flight uses them."""
    for req in victims:
        if req.seq >= 0:
            _retract(state, req)
            req.num_preemptions += 1


def retract_all(state: SchedulerState, keep_kv: bool) -> None:
    """Every running request goes back to the queue; called with no step in flight.

    keep_kv: what they have computed stays in the cache for as long as there is room. Else nobody may use it, they themselves included.
    """
    assert not state.in_flight, "a request in flight cannot be retracted"
    for req in state.running[:]:
        req.keep_kv &= keep_kv
        _retract(state, req)
        req.keep_kv = True


def _retract(state: SchedulerState, req: Req) -> None:
    assert req.num_in_flight == 0, (req.rid, req.num_in_flight)
    # What it has computed goes into the cache: if nobody needs the room after all, it finds it there again.
    state.kv.release(req)
    state.running.remove(req)
    state.waiting.add(req)
    req.num_retractions += 1
    req.note("retracted", state.now_s, req.num_outputs)
    state.counters.num_retracted += 1
    logger.debug("retracted %s after %d output tokens", req.rid, req.num_outputs)
