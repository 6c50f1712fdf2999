"""Which part of the KV cache a request is admitted to (--enable-dp-attention). Runs in the scheduler's thread.

A prefix that is cached in a part need not be computed again there; but if all requests went where the first of them was, one rank would
compute all attention, and its part would fill up while others are idle. So one cached token weighs as much as one token in use.
"""

from collections.abc import Sequence, Set

from headrace.scheduler.request import Req
from headrace.scheduler.state import SchedulerState


def choose(state: SchedulerState, req: Req, reserved: Sequence[int], full: Set[int]) -> int | None:
    """The part for a waiting request; None if all are `full`.

    reserved: tokens of each part that its running requests will still need. A part with room for it goes before one without, then one with
    another sample of its prompt; then the one where it finds the most cached tokens beyond those that running requests use and will need; of
    several, the one with the most free pages, where nothing has to be evicted for it.
    """
    kv = state.kv
    if len(kv.parts) == 1:
        return 0 if not full else None
    cached = kv.peek(req)
    group = req.asked.group
    siblings = {other.part for other in state.running if group and other.asked.group == group}

    def worth(part: int) -> tuple[bool, bool, int, int]:
        load = kv.leased_tokens(part) + reserved[part]
        # At worst nobody else holds the prefix, and it cannot be evicted to make room.
        room = kv.available_tokens(part) - reserved[part] - cached[part]
        fits = not load or state.ratio.expected_tokens(req, kv.page_size, cached[part]) <= room
        return fits, part in siblings, cached[part] - load, kv.parts[part].allocator.num_free

    return max((part for part in range(len(kv.parts)) if part not in full), key=worth, default=None)
