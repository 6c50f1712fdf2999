"""The parts of a running engine besides the main process: one or more schedulers, and the detokenizer, as child processes or otherwise."""

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.config.server_args import ServerArgs
from headrace.frontend.server_info import of_all_replicas
from headrace.messages.channel import Channels, FanOutSender, Ports
from headrace.messages.control import ReadyInfo, ShutdownReq
from headrace.messages.sockets import SocketChannels
from headrace.processes.child import ChildProcess
from headrace.processes.handshake import OnProgress
from headrace.processes.restarts import Restarts

if TYPE_CHECKING:
    from headrace.frontend.tokenizer_manager import TokenizerManager

STOP_S = 3.0
"""How long parts that were told to leave may take."""


class Parts(ABC):
    """The schedulers and the detokenizer, as child processes (`ChildParts`) or as threads (`ThreadParts`), and the channels to them."""

    def __init__(self, channels: Channels, num_schedulers: int = 1) -> None:
        self.channels = channels
        self._to_schedulers = FanOutSender(
            [channels.sender("to_scheduler", replica) for replica in range(num_schedulers)]
        )
        self._to_detokenizer = channels.sender("to_detokenizer")

    @abstractmethod
    def wait_ready(self, on_progress: OnProgress, should_stop: Callable[[], bool]) -> ReadyInfo:
        """Wait until all can serve. Raises the error of one that cannot, after all have been ended."""

    @abstractmethod
    def watch(self, manager: "TokenizerManager", on_death: Callable[[str], None]) -> None:
        """Call `on_death(message)` from a thread when a part has died for good."""

    def processes(self) -> list[tuple[str, int]]:
        """Name and process id of each part that is a process of its own."""
        return []

    @abstractmethod
    def stop(self) -> None:
        """End the parts: asked first, forced after `STOP_S`. Idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """End the parts now, as far as that is possible. Idempotent."""

    def ask_to_leave(self) -> None:
        """Ask every part to end after the message that it is handling."""
        self._to_schedulers.send(ShutdownReq())
        self._to_detokenizer.send(ShutdownReq())


class ChildParts(Parts):
    """Child processes, started and ended together. A thread watches them and restarts those that die (`restarts`). spawn: starts one; replaced
    in tests."""

    def __init__(self, args: ServerArgs, ports: Ports, spawn: type[ChildProcess] = ChildProcess) -> None:
        super().__init__(SocketChannels(ports), args.num_replicas)
        self._args = args
        self.ports = ports
        self._spawn = spawn
        # The schedulers import torch and load the weights: they go first.
        self.children = [
            *(spawn("scheduler", args, ports, replica, source=replica) for replica in range(args.num_replicas)),
            *([spawn("detokenizer", args, ports)] if args.detokenize_in == "process" else []),
        ]
        self._restarts: Restarts | None = None
        self._stopped = False

    def wait_ready(self, on_progress: OnProgress, should_stop: Callable[[], bool]) -> ReadyInfo:
        """See `Parts`."""
        try:
            infos = [child.wait_ready(on_progress, should_stop) for child in self.children]
            return of_all_replicas([info for info in infos if info is not None])
        except BaseException:
            self.kill()
            raise

    def watch(self, manager: "TokenizerManager", on_death: Callable[[str], None]) -> None:
        """See `Parts`. A child that dies is restarted, and `manager` is notified."""
        # Clients were told how many tokens fit: a new scheduler must offer as many. Its adapters are sent to it, since others may have come.
        args = dataclasses.replace(self._args, max_total_tokens=manager.ready.max_total_tokens, lora_paths="")

        def respawn(dead: ChildProcess) -> ChildProcess:
            return self._spawn(dead.kind, args, self.ports, dead.index, manager.link.new_source())

        self._restarts = Restarts(self._args, self.children, respawn, self.channels, manager, on_death)
        self._restarts.start()

    def processes(self) -> list[tuple[str, int]]:
        """See `Parts`."""
        return [(child.name, child.pid) for child in list(self.children)]

    def stop(self) -> None:
        """See `Parts`."""
        if self._stopped:
            return
        self._stopped = True
        if self._restarts is not None:
            self._restarts.stop()
        self.ask_to_leave()
        deadline = time.monotonic() + STOP_S
        for child in self.children:
            child.stop(max(0.0, deadline - time.monotonic()))
        self.channels.close()

    def kill(self) -> None:
        """See `Parts`."""
        self._stopped = True
        for child in self.children:
            child.kill()
        self.channels.close()
