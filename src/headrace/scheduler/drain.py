"""Whom an operation that steps must not meet has to wait for.

Owns the one rule that keeps every request on the weights of one version: all samples of a prompt run with the weights that the first of
them began with. While the gate drains, the planner admits only those; once none is left the operation may take effect. Runs in the
scheduler's thread.
"""

from headrace.scheduler.request import Req
from headrace.scheduler.state import SchedulerState


def has_begun(state: SchedulerState, req: Req) -> bool:
    """It has taken part in a step, here or in a scheduler that died since, or another sample of its prompt has."""
    return req.has_begun or req.asked.attempt > 0 or req.asked.group in state.group_cached


def is_drained(state: SchedulerState) -> bool:
    """No step is in flight, and none is to come for a request that has begun: all of those have ended, or steps are held anyway."""
    if state.in_flight:
        return False
    return state.gate.holds or not (state.running or any(has_begun(state, req) for req in state.waiting))
