"""What the front end does when a process of the engine dies, and when it has been restarted.

Owns the restarted schedulers that are on their way into service: each first gets all operations that the others have carried out, then it
gets requests. Nothing is awaited between the last operation and the first request, so no operation is missed. Does not notice deaths nor
start processes (`processes`). The methods may be called from any thread; the work is done in the tokenizer manager's event loop.
"""

import asyncio
import concurrent.futures
from collections.abc import Sequence
from typing import Protocol

from headrace.errors import ExecutionError, HeadraceError
from headrace.frontend.engine_link import EngineLink
from headrace.frontend.engine_loop import EngineLoop
from headrace.frontend.health import Heartbeats
from headrace.frontend.records import Records
from headrace.frontend.replica import Replica
from headrace.frontend.runtime_settings import RuntimeSettings
from headrace.frontend.weight_control import WeightControl
from headrace.log import get_logger
from headrace.messages.channel import Sender
from headrace.metrics.catalog import Metrics

logger = get_logger(__name__)

LOOK_S = 0.2
"""Seconds between two checks that the event loop still runs, while a thread waits for it."""


class Asker(Protocol):
    """Waits for replies of replicas."""

    def lost(self, replica: Replica) -> None:
        """A replica has died: do not wait for its replies."""

    def fail_all(self, error: HeadraceError) -> None:
        """End every waiting operation with `error`, and every later one."""


class Teller(Protocol):
    """Has something to tell a restarted scheduler before it gets requests."""

    def tell_scheduler(self, sender: Sender) -> None:
        """Send what a scheduler that has just started does not know."""


class EngineParts:
    """See the module docstring.

    num_restarts: how often a process came back into service. askers: may wait for replies of a scheduler that dies. tellers: are called in
    this order.
    """

    def __init__(
        self,
        engine_loop: EngineLoop,
        link: EngineLink,
        weights: WeightControl,
        settings: RuntimeSettings,
        heartbeats: Heartbeats,
        records: Records,
        metrics: Metrics,
        askers: Sequence[Asker],
        tellers: Sequence[Teller],
    ) -> None:
        self.num_restarts = 0
        self._engine_loop = engine_loop
        self._link = link
        self._weights = weights
        self._settings = settings
        self._heartbeats = heartbeats
        self._records = records
        self._metrics = metrics
        self._askers = askers
        self._tellers = tellers
        self._rejoining: dict[int, Replica] = {}

    @property
    def num_rejoining(self) -> int:
        """Restarted schedulers that are not yet in service."""
        return len(self._rejoining)

    def down(self, name: str, index: int | None = None) -> None:
        """A process has died and is being restarted. index: of a scheduler; None = the detokenizer."""
        if not self._engine_loop.is_here(self.down, name, index):
            return
        self._heartbeats.forget(name)
        self._records.crash_dump(f"the {name} process has died and is being restarted")
        if index is None:
            self._link.detokenizer_down()
            return
        if (rejoining := self._rejoining.get(index)) is not None:
            rejoining.is_lost = True
            self._weights.lost(rejoining)
        replica = self._link.scheduler_down(index)
        for asker in self._askers:
            asker.lost(replica)

    def gone(self, name: str, index: int) -> None:
        """A scheduler that has died is not restarted; the other replicas continue."""
        if not self._engine_loop.is_here(self.gone, name, index):
            return
        logger.error("the %s process is not restarted; the other replicas continue", name)
        self._link.scheduler_gone(index)

    def up(self, name: str, index: int | None = None, source: int = 0, sender: Sender | None = None) -> None:
        """A process is back. index, source, sender: of a restarted scheduler."""
        if not self._engine_loop.is_here(self.up, name, index, source, sender):
            return
        self._heartbeats.begin_anew(name)
        self.num_restarts += 1
        self._metrics.count_restart(name)
        if index is None or sender is None:
            self._settings.tell_detokenizer()
            self._link.detokenizer_up()
        else:
            for teller in self._tellers:
                teller.tell_scheduler(sender)
            self._link.scheduler_up(index, source, sender)

    def rejoin(self, name: str, index: int, source: int, sender: Sender, started_from: str) -> None:
        """Bring a restarted scheduler into service. From any thread but the loop's; returns when it is in service.

        started_from: fingerprint of the checkpoint that it began with. Raises ModelError when the files of the current weights are missing or
        have changed, another HeadraceError when it fails otherwise.
        """
        loop = self._engine_loop.asyncio_loop
        if loop is None:
            self._weights.check_start(started_from)
            self.up(name, index, source, sender)
            return
        done = asyncio.run_coroutine_threadsafe(self._catch_up(name, index, source, sender, started_from), loop)
        while True:
            try:
                return done.result(LOOK_S)
            except concurrent.futures.TimeoutError:
                if not loop.is_running():
                    raise ExecutionError("the server has stopped") from None

    async def _catch_up(self, name: str, index: int, source: int, sender: Sender, started_from: str) -> None:
        replica = Replica(index, sender, source)
        self._rejoining[index] = replica
        try:
            await self._weights.catch_up(replica, started_from)
            if replica.is_lost:
                raise ExecutionError(f"the {name} process died before it could serve")
            self.up(name, index, source, sender)
        finally:
            del self._rejoining[index]
