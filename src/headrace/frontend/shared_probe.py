"""A health probe of the engine, shared by concurrent callers.

A caller asks whether the engine can generate a token. However many ask, only one probe runs at a time, and its result is reused for a
moment. Used by the tokenizer manager, in its event loop only.
"""

import asyncio
from collections.abc import Awaitable, Callable

FRESH_S = 1.0
"""A result is reused for this many seconds."""


class SharedProbe:
    """Shares the results of `probe`, which must not raise. clock: seconds."""

    def __init__(self, probe: Callable[[], Awaitable[bool]], clock: Callable[[], float]) -> None:
        self._probe = probe
        self._clock = clock
        self._running: asyncio.Task[bool] | None = None
        self._found = False
        self._found_s = float("-inf")

    async def result(self) -> bool:
        """The probe's result, new or recent. Cancelling one caller does not affect others."""
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
