"""One probe of the engine for everybody who asks at the same time.

Anybody may ask whether the engine can make a token. However many do, one probe at a time runs, and what it found is the answer for a
moment. Used by the tokenizer manager, in its event loop only.
"""

import asyncio
from collections.abc import Awaitable, Callable

FRESH_S = 1.0
"""A finding is the answer for this many seconds."""


class SharedProbe:
    """Shares the findings of `probe`, which must not raise. clock: seconds."""

    def __init__(self, probe: Callable[[], Awaitable[bool]], clock: Callable[[], float]) -> None:
        self._probe = probe
        self._clock = clock
        self._running: asyncio.Task[bool] | None = None
        self._found = False
        self._found_s = float("-inf")

    async def result(self) -> bool:
        """What the probe finds now, or found just before. A caller that is cancelled disturbs no other."""
        if self._running is None:
            if self._clock() - self._found_s < FRESH_S:
                return self._found
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._running)

    async def _run(self) -> bool:
        try:
            self._found = await self._probe()
            self._found_s = self._clock()
            return self._found
        finally:
            self._running = None
