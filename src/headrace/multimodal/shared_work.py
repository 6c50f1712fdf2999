"""Work on the content of files that several requests share, and refusals of it. Runs in the main process's event loop."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.multimodal.limits import MediaRefusedError
from headrace.turns import Kept, asking

T = TypeVar("T")


class RecentRefusals:
    """Refusals of files that took all that an item may take, so that sending one again and again does not hold up others. Each is remembered for a
    while only: that it took so much may have been another's doing."""

    def __init__(self, seconds: float = 60.0, max_refusals: int = 256) -> None:
        self._seconds = seconds
        self._refusals: Kept[bytes, tuple[float, MediaRefusedError]] = Kept(max_refusals)

    def check(self, key: bytes) -> None:
        if (found := self._refusals.get(key)) is None:
            return
        until_s, error = found
        if time.monotonic() < until_s:
            raise MediaRefusedError(error.message, error.kind)
        self._refusals.drop(key)

    def add(self, key: bytes, error: MediaRefusedError) -> None:
        self._refusals.put(key, (time.monotonic() + self._seconds, error), 1, asking().tenant)


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: "asyncio.Task[T]"
    num_waiting: int = 0


class Flights(Generic[T]):
    """Work by key that is done once for all who wait for it. It is cancelled when nobody waits any more."""

    def __init__(self) -> None:
        self._flights: dict[bytes, _Flight[T]] = {}

    async def share(self, key: bytes, make: Callable[[], Coroutine[None, None, T]]) -> T:
        """What `make` gives, or what another call's that is in flight does. Raises as it does."""
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.get_running_loop().create_task(make()))
            # Whoever waits gets its error; if nobody does, it is not told either.
            flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._flights[key] = flight
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if not flight.num_waiting:
                if self._flights.get(key) is flight:
                    del self._flights[key]
                flight.task.cancel()  # of no effect if it is done

    def __contains__(self, key: bytes) -> bool:
        return key in self._flights
