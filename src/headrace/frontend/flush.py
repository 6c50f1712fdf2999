"""Emptying the prefix cache as soon as nothing runs. Runs in the tokenizer manager's event loop."""

import asyncio
import math
from collections.abc import Awaitable, Callable

from headrace.errors import RequestError
from headrace.messages.control import FlushCacheReply

MAX_WAIT_S = 600.0
"""Longest time that a flush may be asked to wait."""

RETRY_S = 0.02
"""Between two attempts: a step or so, since a request that was aborted is in the way until its last step has ended."""


async def flush_when_idle(flush: Callable[[], Awaitable[FlushCacheReply]], timeout_s: float) -> FlushCacheReply:
    """Call `flush` until it succeeds, at most for `timeout_s` seconds; the last reply.

    timeout_s: 0 = one attempt. Raises RequestError for a time that is negative, not a number or longer than `MAX_WAIT_S`.
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
