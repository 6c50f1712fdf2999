"""Brings a restarted scheduler into service: first it gets all operations that the others have carried out, then it gets requests.

Owns the schedulers that are on their way into service. Nothing is awaited between the last operation of the log and the first request, so
no operation is missed. Called from the thread that started the process; works in the event loop of the tokenizer manager.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable

from headrace.errors import ExecutionError
from headrace.frontend.replica import Replica
from headrace.frontend.weight_control import WeightControl
from headrace.messages.channel import Sender

LOOK_S = 0.2


class Rejoin:
    """See the module docstring. put_into_service: see `TokenizerManager.part_up`."""

    def __init__(
        self, weights: WeightControl, put_into_service: Callable[[str, int | None, int, Sender | None], None]
    ) -> None:
        self._weights = weights
        self._put_into_service = put_into_service
        self._on_the_way: dict[int, Replica] = {}

    def lost(self, index: int) -> None:
        """The scheduler with this index has died: stop waiting for its replies. Runs in the event loop."""
        if (replica := self._on_the_way.get(index)) is not None:
            replica.is_lost = True
            self._weights.lost(replica)

    def run(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        index: int,
        source: int,
        sender: Sender,
        started_from: str,
    ) -> None:
        """Bring the scheduler into service. From any thread but the loop's; returns when it is in service.

        Raises ModelError when the files of the current weights are missing or have changed, another HeadraceError when it fails otherwise.
        """
        done = asyncio.run_coroutine_threadsafe(self._run(name, index, source, sender, started_from), loop)
        while True:
            try:
                return done.result(LOOK_S)
            except concurrent.futures.TimeoutError:
                if not loop.is_running():
                    raise ExecutionError("the server has stopped") from None

    async def _run(self, name: str, index: int, source: int, sender: Sender, started_from: str) -> None:
        replica = Replica(index, sender, source)
        self._on_the_way[index] = replica
        try:
            await self._weights.catch_up(replica, started_from)
            if replica.is_lost:
                raise ExecutionError(f"the {name} process died before it could serve")
            self._put_into_service(name, index, source, sender)
        finally:
            del self._on_the_way[index]
