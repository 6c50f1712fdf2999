"""Which requests must end before an operation that needs exclusive access, such as a weight update.

Owns the rule that keeps every request on one version of the weights: all samples of a prompt run with the weights that the first of
them started with. While the gate drains, the planner admits only such samples; once none is left, the operation may take effect. Runs in the
scheduler's thread.
"""

from itertools import chain

from headrace.scheduler.request import Req
from headrace.scheduler.state import SchedulerState


def has_begun(state: SchedulerState, req: Req) -> bool:
    """Whether it, or another sample of its prompt, has taken part in a step, here or in a scheduler that has died."""
    return req.has_begun or req.asked.attempt > 0 or state.groups.has_begun(req)


def is_drained(state: SchedulerState) -> bool:
    """Whether no step is in flight and no request that has begun will take another: all have ended, or steps are held."""
    if state.in_flight:
        return False
    if state.gate.holds:
        return True
    return not (state.running or any(has_begun(state, req) for req in chain(state.waiting, state.compiling)))
