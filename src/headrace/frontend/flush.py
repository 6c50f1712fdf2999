"""Flushes the prefix cache as soon as no request runs. Runs in the tokenizer manager's event loop."""

import asyncio
import math
from collections.abc import Awaitable, Callable

from headrace.errors import RequestError
from headrace.messages.control import FlushCacheReply

MAX_WAIT_S = 600.0
"""Longest timeout of a flush."""

RETRY_S = 0.02
"""Time between attempts: about one step, since an aborted request blocks the flush until its last step has ended."""


async def flush_when_idle(flush: Callable[[], Awaitable[FlushCacheReply]], timeout_s: float) -> FlushCacheReply:
    """Call `flush` until it succeeds, for at most `timeout_s` seconds. Returns the last reply.

    timeout_s: 0 = one attempt. Raises RequestError if it is negative, not a number or longer than `MAX_WAIT_S`.
    """
    if not (math.isfinite(timeout_s) and 0.0 <= timeout_s <= MAX_WAIT_S):
        raise RequestError(f"timeout must be between 0 and {MAX_WAIT_S:g} seconds, got {timeout_s}", "timeout")
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    while True:
        reply = await flush()
        if reply.success or clock() >= deadline_s:
            return reply
        await asyncio.sleep(RETRY_S)
