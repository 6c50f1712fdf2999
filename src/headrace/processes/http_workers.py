"""HTTP workers (--tokenizer-worker-num): processes that read requests, tokenize them and write replies, for many streams at once.

Owns their start, their restarts and their end; what a worker runs is in `child_main`. With one worker, the default, none of this exists:
the main process does it all. With more, the main process keeps what exists only once (the `TokenizerManager` with its rids, limits,
sessions and adapters, and the connection to the engine), and the workers share its listening socket. Runs in the main process's event loop.
"""

import asyncio
import dataclasses
import itertools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.config.server_args import ServerArgs
from headrace.frontend.front_door import FrontDoor
from headrace.messages.channel import Channels, Ports
from headrace.messages.control import ShutdownReq
from headrace.messages.front import FrontNews, HttpWorkerStart
from headrace.processes.child import ChildProcess, stop_all
from headrace.processes.recovery import Recovery, RestartBudget, Supervisor
from headrace.server.address import local_url

if TYPE_CHECKING:
    from headrace.frontend.tokenizer_manager import TokenizerManager
    from headrace.server.auth import ApiKeys
    from headrace.server.context import ServerStatus

STOP_WORKER_S = 5.0
"""How long a worker that was told to stop may finish its replies before it is killed."""


class HttpWorkers:
    """The workers of a server, in place of its `Server`: see there for `serve`, `shutdown` and `url`.

    listening: the socket that they share. keys: of --api-key-file. status: of the server. on_death: set by the owner; called from a
    thread with a message when a worker has ended for good.
    """

    def __init__(
        self,
        args: ServerArgs,
        manager: "TokenizerManager",
        channels: Channels,
        ports: Ports,
        listening: socket.socket,
        keys: "ApiKeys | None",
        status: "ServerStatus",
    ) -> None:
        from headrace.server.request_frontend import METHODS

        self.url = local_url(args, listening.getsockname()[1])
        self.on_death: Callable[[str], None] = lambda message: None
        self.children: list[ChildProcess] = []
        self._args = args
        self._manager = manager
        self._channels = channels
        self._ports = ports
        self._listening = listening
        self._keys = keys
        self._status = status
        self._numbers = itertools.count()
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        manager.metrics.processes.watch(lambda: [(child.name, child.pid) for child in list(self.children)])
        self._door = FrontDoor(
            manager,
            METHODS,
            channels.receiver("to_front"),
            self._news,
            lambda name: keys.of_name(name) if keys is not None else None,
        )

    async def serve(self, on_started: Callable[[], None]) -> None:
        """Start the workers and serve until `shutdown`. Raises why one of them cannot."""
        taking = self._loop.create_task(self._door.run())
        budget = RestartBudget(0 if self._args.disable_recovery else self._args.max_restarts)
        recovery = Recovery(
            self.children,
            budget,
            respawn=lambda dead: self._start(dead.index),
            on_down=lambda dead: self._loop.call_soon_threadsafe(self._door.remove, dead.source),
            on_up=lambda child: None,
            on_failure=lambda _, message: self.on_death(message),
            on_refused=lambda _, message, __: self.on_death(message),
            start_limit_s=self._args.watchdog_timeout_s,
        )
        supervisor = Supervisor(self.children, lambda message: self.on_death(message), recover=recovery.recover)
        try:
            self.children += [self._start(slot) for slot in range(self._args.tokenizer_worker_num)]
            await asyncio.gather(
                *(asyncio.to_thread(child.wait_ready, should_stop=self._stop.is_set) for child in self.children)
            )
            supervisor.start()
            on_started()
            await self._stop.wait()
        finally:
            await asyncio.to_thread(self._end, supervisor, recovery)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            self._listening.close()

    def shutdown(self, force: bool = False) -> None:
        """Stop; `force` does not wait for replies that are being written. From the loop."""
        if force:
            for child in self.children:
                child.kill()
        self._stop.set()

    def _start(self, slot: int) -> ChildProcess:
        number = next(self._numbers)
        args = self._args if number == 0 else dataclasses.replace(self._args, warmups="", skip_server_warmup=True)
        start = HttpWorkerStart(number, slot, self._listening.fileno(), self._manager.ready)
        child = ChildProcess("http", args, self._ports, index=slot, source=number, http=start)
        sender = self._channels.sender("to_worker", slot)
        self._loop.call_soon_threadsafe(self._door.add, number, sender)
        return child

    def _end(self, supervisor: Supervisor, recovery: Recovery) -> None:
        supervisor.stop()
        recovery.stop()
        for child in self.children:
            self._channels.sender("to_worker", child.index).send(ShutdownReq())
        stop_all(self.children, STOP_WORKER_S)

    def _news(self) -> FrontNews:
        return FrontNews(
            self._manager.adapters.names,
            self._manager.weights.version,
            accepting=not self._status.draining,
            model_path=self._manager.weights.model_path,
            log_level=self._manager.settings.log_level,
            keys_generation=self._keys.generation if self._keys is not None else 0,
        )
