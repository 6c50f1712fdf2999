"""The parts of an engine as child processes, watched, and started again when they die."""

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace import log
from headrace.config.server_args import ServerArgs
from headrace.frontend.data_parallel_controller import of_all_replicas
from headrace.messages.channel import Ports, ZmqChannels
from headrace.messages.control import ReadyInfo
from headrace.processes.child import ChildProcess
from headrace.processes.handshake import OnProgress
from headrace.processes.parts import STOP_S, Parts
from headrace.processes.recovery import Recovery, RestartBudget
from headrace.processes.supervisor import Supervisor

if TYPE_CHECKING:
    from headrace.frontend.tokenizer_manager import TokenizerManager

logger = log.get_logger(__name__)


class ChildParts(Parts):
    """Child processes, watched by a thread, and started again when they die. spawn: starts one."""

    def __init__(self, args: ServerArgs, ports: Ports, spawn: type[ChildProcess] = ChildProcess) -> None:
        super().__init__(ZmqChannels(ports), args.dp_size)
        self._args = args
        self.ports = ports
        self._spawn = spawn
        # The schedulers import torch and load the weights: they go first.
        self.children = [
            *(spawn("scheduler", args, ports, replica, source=replica) for replica in range(args.dp_size)),
            spawn("detokenizer", args, ports),
        ]
        self._supervisor: Supervisor[ChildProcess] | None = None
        self._recovery: Recovery[ChildProcess] | None = None
        self._stopped = False

    def wait_ready(self, on_progress: OnProgress, should_stop: Callable[[], bool]) -> ReadyInfo:
        """Until all can serve. Raises why one cannot; then none is left."""
        try:
            infos = [child.wait_ready(on_progress, should_stop) for child in self.children]
            return of_all_replicas([info for info in infos if info is not None])
        except BaseException:
            self.kill()
            raise

    def watch(self, manager: "TokenizerManager", on_death: Callable[[str], None]) -> None:
        """Start children that die again and tell `manager`; call `on_death(message)` from a thread when that is not to be."""
        # What fitted into memory when all was new is what clients have been told of. Adapters are sent: others may have come since.
        args = dataclasses.replace(self._args, max_total_tokens=manager.ready.max_total_tokens, lora_paths="")

        def respawn(dead: ChildProcess) -> ChildProcess:
            return self._spawn(dead.kind, args, self.ports, dead.index, manager.link.new_source())

        def on_down(dead: ChildProcess) -> None:
            manager.part_down(dead.name, dead.index if dead.kind == "scheduler" else None)

        def on_up(child: ChildProcess) -> None:
            if child.kind == "scheduler":
                assert child.info is not None, child.name
                sender = self.channels.sender("to_scheduler", child.index)
                try:
                    manager.rejoin(child.name, child.index, child.source, sender, child.info.fingerprint)
                except BaseException:
                    sender.close()  # what is unread is not for the life after this one
                    raise
            else:
                manager.part_up(child.name)

        def recover(dead: ChildProcess) -> bool:
            if dead.kind != "scheduler" or manager.weights.can_restore:
                return recovery.recover(dead)
            logger.error(
                "the weights were pushed, and only the schedulers that got them have them: it is not started again"
            )
            if not self._others_serve(dead):
                return False
            recovery.retire(dead)
            manager.part_gone(dead.name, dead.index)
            return True

        def on_refused(dead: ChildProcess, message: str) -> None:
            if self._others_serve(dead):
                manager.part_gone(dead.name, dead.index)
            else:
                on_death(message)

        manager.link.on_dismissed = self._kill_scheduler
        budget = RestartBudget(0 if self._args.disable_recovery else self._args.max_restarts)
        self._recovery = recovery = Recovery(
            self.children,
            budget,
            respawn,
            on_down,
            on_up,
            lambda _, message: on_death(message),
            on_refused,
            self._args.watchdog_timeout_s,
        )
        self._supervisor = Supervisor(self.children, on_death, manager.heartbeats.age_s, recover)
        self._supervisor.start()

    def _others_serve(self, dead: ChildProcess) -> bool:
        """Whether the requests of a scheduler that does not come back can go to another one."""
        return dead.kind == "scheduler" and any(
            child.kind == "scheduler" and child is not dead and child.exit_code is None
            for child in tuple(self.children)
        )

    def _kill_scheduler(self, replica: int) -> None:
        for child in tuple(self.children):
            if child.kind == "scheduler" and child.index == replica:
                child.end()

    def stop(self) -> None:
        """End the children: asked first, killed after a few seconds. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._supervisor is not None:
            self._supervisor.stop()
        if self._recovery is not None:
            self._recovery.stop()
        self.ask_to_leave()
        deadline = time.monotonic() + STOP_S
        for child in self.children:
            child.stop(max(0.0, deadline - time.monotonic()))
        self.channels.close()

    def kill(self) -> None:
        """End the children now."""
        self._stopped = True
        for child in self.children:
            child.kill()
        self.channels.close()
