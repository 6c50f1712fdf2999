"""What is done when a part of the engine dies: another one is started, the other replicas take over, or the engine has failed.

Puts together the three that know how: `Supervisor` notices deaths, `Recovery` starts children again, and the TokenizerManager moves
the requests. Its methods run in their threads.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace import log
from headrace.config.server_args import ServerArgs
from headrace.messages.channel import Channels
from headrace.processes.child import ChildProcess
from headrace.processes.recovery import Recovery, RestartBudget
from headrace.processes.supervisor import Supervisor

if TYPE_CHECKING:
    from headrace.frontend.tokenizer_manager import TokenizerManager

logger = log.get_logger(__name__)


class Restarts:
    """Watches the children of an engine from `start` to `stop`.

    children: those that live; a dead one is taken out and its replacement put in. respawn: starts a child in place of a dead one.
    on_death: called from a thread, with a message for clients, when the engine cannot continue.
    """

    def __init__(
        self,
        args: ServerArgs,
        children: list[ChildProcess],
        respawn: Callable[[ChildProcess], ChildProcess],
        channels: Channels,
        manager: "TokenizerManager",
        on_death: Callable[[str], None],
    ) -> None:
        self._children = children
        self._channels = channels
        self._manager = manager
        self._on_death = on_death
        self._recovery = Recovery(
            children,
            RestartBudget(0 if args.disable_recovery else args.max_restarts),
            respawn,
            on_down=self._down,
            on_up=self._up,
            on_failure=lambda _, message: on_death(message),
            on_refused=self._refused,
            start_limit_s=args.watchdog_timeout_s,
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

    def start(self) -> None:
        """Watch from now on."""
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

    def _refused(self, dead: ChildProcess, message: str) -> None:
        """Its options or its model were refused, so it is not restarted."""
        if self._others_serve(dead):
            self._manager.parts.gone(dead.name, dead.index)
        else:
            self._on_death(message)

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
