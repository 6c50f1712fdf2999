"""The parts of a running engine besides the main process: one or more schedulers, and the detokenizer, as child processes or otherwise; and what
is done when one dies: another one is started, the other replicas take over, or the engine has failed (`Restarts`).
"""

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace import log
from headrace.config.server_args import ServerArgs
from headrace.errors import HeadraceError, ModelError
from headrace.frontend.server_info import of_all_replicas
from headrace.messages.channel import Channels, FanOutSender, Ports
from headrace.messages.control import ReadyInfo, ShutdownReq
from headrace.messages.sockets import SocketChannels
from headrace.messages.weights import UpdateFromDisk
from headrace.processes.child import ChildProcess, stop_all
from headrace.processes.handshake import OnProgress
from headrace.processes.recovery import Recovery, RestartBudget, Supervisor

if TYPE_CHECKING:
    from headrace.frontend.tokenizer_manager import TokenizerManager

logger = log.get_logger(__name__)

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
        """Every part, after the message that it is handling."""
        self._to_schedulers.send(ShutdownReq())
        self._to_detokenizer.send(ShutdownReq())


class ChildParts(Parts):
    """Child processes, started and ended together. A thread watches them and restarts those that die (`restarts`). spawn: starts one; replaced
    in tests. args_of_update: see `execution.model_source`."""

    def __init__(
        self,
        args: ServerArgs,
        ports: Ports,
        spawn: type[ChildProcess] = ChildProcess,
        *,
        args_of_update: Callable[[ServerArgs, UpdateFromDisk], ServerArgs],
    ) -> None:
        super().__init__(SocketChannels(ports), args.num_replicas)
        self._args = args
        self.ports = ports
        self._spawn = spawn
        self._args_of_update = args_of_update
        # The schedulers import torch and load the weights: they go first.
        self.children = [
            *(spawn("scheduler", args, ports, replica, source=replica) for replica in range(args.num_replicas)),
            *([spawn("detokenizer", args, ports)] if args.detokenize_in == "process" else []),
        ]
        self._restarts: Restarts | None = None
        self._stopped = False

    def wait_ready(self, on_progress: OnProgress, should_stop: Callable[[], bool]) -> ReadyInfo:
        try:
            infos = [child.wait_ready(on_progress, should_stop) for child in self.children]
            return of_all_replicas([info for info in infos if info is not None])
        except BaseException:
            self.kill()
            raise

    def watch(self, manager: "TokenizerManager", on_death: Callable[[str], None]) -> None:
        # Clients were told how many tokens fit: a new scheduler must offer as many. Its adapters are sent to it, since others may have come.
        args = dataclasses.replace(self._args, max_total_tokens=manager.ready.max_total_tokens, lora_paths="")

        def respawn(dead: ChildProcess, begin_with: UpdateFromDisk | None) -> ChildProcess:
            own = args
            if begin_with is not None:
                own = dataclasses.replace(
                    self._args_of_update(args, begin_with),
                    tokenizer_path=args.tokenizer_name,
                    served_model_name=",".join(args.served_names),
                )
            return self._spawn(dead.kind, own, self.ports, dead.index, manager.link.new_source())

        self._restarts = Restarts(self._args, self.children, respawn, self.channels, manager, on_death)
        self._restarts.start()

    def processes(self) -> list[tuple[str, int]]:
        return [(child.name, child.pid) for child in list(self.children)]

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._restarts is not None:
            self._restarts.stop()
        self.ask_to_leave()
        stop_all(self.children, STOP_S)
        self.channels.close()

    def kill(self) -> None:
        self._stopped = True
        for child in self.children:
            child.kill()
        self.channels.close()


class Restarts:
    """Watches the children of an engine from `start` to `stop`. Puts together the three that know how: `Supervisor` notices deaths, `Recovery` starts
    children again, and the TokenizerManager moves the requests. Its methods run in their threads.

    children: those that live; a dead one is taken out and its replacement put in. respawn: starts a child in place of a dead one, a scheduler with
    these weights; None = those of the server's start. on_death: called from a thread, with a message for clients, when the engine cannot continue.
    """

    def __init__(
        self,
        args: ServerArgs,
        children: list[ChildProcess],
        respawn: Callable[[ChildProcess, UpdateFromDisk | None], ChildProcess],
        channels: Channels,
        manager: "TokenizerManager",
        on_death: Callable[[str], None],
    ) -> None:
        self._children = children
        self._channels = channels
        self._manager = manager
        self._on_death = on_death
        self._respawn = respawn
        # Schedulers without weights that they could load, with the reason; and those that begin with the weights in force.
        self._refused: list[tuple[ChildProcess, str]] = []
        self._begin_with_current: set[int] = set()
        self._reviving = threading.Lock()
        self._recovery = Recovery(
            children,
            RestartBudget(0 if args.disable_recovery else args.max_restarts),
            self._start_again,
            on_down=self._down,
            on_up=self._up,
            on_failure=lambda _, message: on_death(message),
            on_refused=self._refuse,
            start_limit_s=args.watchdog_timeout_s,
            may_start_otherwise=self._may_begin_with_current,
        )
        # With --nnodes, all nodes end together and are started again by who started them.
        self._is_alone = args.num_nodes == 1
        self._supervisor = Supervisor(
            children,
            on_death,
            manager.heartbeats.age_s,
            self._recover,
            on_silence=(lambda silent: None) if self._is_alone else _end_stopped_scheduler,
        )
        manager.link.on_dismissed = self._end_scheduler
        manager.weights.revive = self._revive

    def start(self) -> None:
        self._supervisor.start()

    def stop(self) -> None:
        """Children may end from now on, and none is started any more. Idempotent."""
        self._supervisor.stop()
        self._recovery.stop()

    def _recover(self, dead: ChildProcess) -> bool:
        """Deal with a death. False: the engine cannot continue."""
        if dead.kind == "scheduler" and not self._is_alone:
            logger.error("the ranks of all nodes end together: this server ends, too")
            return False
        if dead.kind != "scheduler" or self._manager.weights.can_restore:
            return self._recovery.recover(dead)
        logger.error(
            "the weights were pushed, so only the schedulers that received them have them: it is not restarted"
        )
        if not self._others_serve(dead):
            return False
        self._recovery.retire(dead)
        self._refused.append((dead, "the weights were pushed"))
        self._manager.parts.gone(dead.name, dead.index)
        return True

    def _down(self, dead: ChildProcess) -> None:
        self._manager.parts.down(dead.name, dead.index if dead.kind == "scheduler" else None)

    def _up(self, child: ChildProcess) -> None:
        """Put a replacement into service. Raises HeadraceError when it cannot be brought to the state of the others."""
        if child.kind != "scheduler":
            self._manager.parts.up(child.name)
            return
        assert child.info is not None, child.name
        sender = self._channels.sender("to_scheduler", child.index)
        try:
            self._manager.parts.rejoin(child.name, child.index, child.source, sender, child.info.fingerprint)
        except BaseException:
            sender.close()  # what it has not read must not reach the next incarnation
            raise

    def _start_again(self, dead: ChildProcess) -> ChildProcess:
        begins_with_current = dead.kind == "scheduler" and dead.index in self._begin_with_current
        return self._respawn(dead, self._manager.weights.reload() if begins_with_current else None)

    def _may_begin_with_current(self, process: ChildProcess, error: HeadraceError) -> bool:
        """Whether the checkpoint of the server's start cannot be read any more, and the weights in force are others."""
        if (
            process.kind != "scheduler"
            or process.index in self._begin_with_current
            or not isinstance(error, ModelError)
        ):
            return False
        self._begin_with_current.add(process.index)
        return self._manager.weights.reload() is not None

    def _refuse(self, dead: ChildProcess, message: str, error: HeadraceError) -> None:
        """Its options or its model were refused, so it is not restarted, unless other weights are loaded."""
        awaits_weights = dead.kind == "scheduler" and isinstance(error, ModelError)
        if awaits_weights:
            self._refused.append((dead, error.message))
        if awaits_weights or self._others_serve(dead):
            self._manager.parts.gone(dead.name, dead.index)
        else:
            self._on_death(message)

    def _revive(self) -> str:
        """Start the refused schedulers with the weights in force. Returns why one was refused again, or ""."""
        with self._reviving:
            refused = [self._refused.pop(0)[0] for _ in range(len(self._refused))]
            self._begin_with_current |= {dead.index for dead in refused}
            self._recovery.revive(refused)
            return self._refused[0][1] if self._refused else ""

    def _others_serve(self, dead: ChildProcess) -> bool:
        """Whether the requests of a scheduler that does not come back can go to another one."""
        return dead.kind == "scheduler" and any(
            child.kind == "scheduler" and child is not dead and child.exit_code is None
            for child in tuple(self._children)
        )

    def _end_scheduler(self, replica: int) -> None:
        for child in tuple(self._children):
            if child.kind == "scheduler" and child.index == replica:
                child.end()


def _end_stopped_scheduler(silent: ChildProcess) -> None:
    """A scheduler that was stopped has lost the other nodes: it will not go on, and its clients wait."""
    if silent.kind == "scheduler":
        silent.end()
