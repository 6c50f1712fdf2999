"""Retraction: moves running requests back to the queue when the pool is full, a more important request comes, or generation pauses.

Their outputs are kept; their KV is computed again later.
"""

from collections.abc import Sequence

from headrace.log import get_logger
from headrace.messages.outputs import FinishReason
from headrace.scheduler.policy import effective_priority
from headrace.scheduler.request import Req
from headrace.scheduler.state import SchedulerState

logger = get_logger(__name__)


def make_room(state: SchedulerState, wanting: Req) -> bool:
    """Retract one request to free pages for `wanting`. No step in flight may use a request of its part of the KV cache.

    The victim is the least important running request of the part (lowest priority, then latest arrival), so that the oldest always
    progresses. It may be `wanting` itself; if that is alone, it can never fit and ends here.
    Returns False when `wanting` was retracted or has ended.
    """
    candidates = [req for req in state.running if req.finish is None and req.seq >= 0 and req.part == wanting.part]
    if len(candidates) == 1:
        total = state.kv.part_tokens
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
