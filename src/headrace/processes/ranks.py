"""The other ranks of a scheduler with --tp-size or --pp-size: processes that it starts, watches, and takes with it when it ends.

The ranks of a group live and die together: when one is gone, the scheduler's process exits, and its parent starts the scheduler again, which
starts new ranks. So nobody else needs to know of them. With --nnodes, some of them are processes of other hosts (`node_process`), and then the
scheduler is not started again by its parent, but all nodes end.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from headrace.config.server_args import ServerArgs
from headrace.distributed.base import Group
from headrace.errors import ExecutionError
from headrace.log import get_logger
from headrace.messages.channel import Ports
from headrace.processes.child import ChildProcess, stop_all
from headrace.processes.handshake import OnProgress
from headrace.processes.numa import Binding
from headrace.processes.rank_groups import descriptors_of, joined, starts_here
from headrace.processes.recovery import describe_exit

logger = get_logger(__name__)

CHECK_S = 0.1
STOP_S = 2.0


class Ranks:
    """The followers of one scheduler, from the start of the first to the end of the last; a context manager.

    places: with --numa-bind, of all ranks; the leader is bound already. rank: the leader's part of the model.
    """

    def __init__(self, args: ServerArgs, ports: Ports, replica: int, places: Sequence[Binding] = ()) -> None:
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._followers: list[ChildProcess] = []
        self._ends = contextlib.ExitStack()
        starts = starts_here(args, places)
        fds = descriptors_of(starts)
        try:
            self.rank = self._ends.enter_context(joined(args, starts[0]))
            fds -= set(starts[0].of_links)
            for start in starts[1:]:
                self._followers.append(ChildProcess("follower", args, ports, replica, rank=start))
        finally:
            for fd in fds:
                os.close(fd)
        self._group.wait_for_ranks(args.dist_timeout, self.check)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        if error is not None:
            self._group.break_up("the leader ends")
        stop_all(self._followers, STOP_S)
        self._ends.close()

    def checked(self, on_progress: OnProgress) -> OnProgress:
        """What the leader calls while it loads: raises the error of a follower that has ended instead of loading its part."""

        def report(done_bytes: int, total_bytes: int) -> None:
            self.check()
            on_progress(done_bytes, total_bytes)

        return report

    def wait_loaded(self) -> None:
        for follower in self._followers:
            follower.wait_loaded()
        self._group.wait_ready(self.check)

    def wait_ready(self) -> None:
        for follower in self._followers:
            follower.wait_ready()
        self._group.wait_ready(self.check)
        self._watcher.start()

    def give_up(self, reason: str) -> None:
        """Also ends this process."""
        if self._stopping.is_set():
            return
        logger.error("the ranks cannot go on: %s", reason)
        self._group.break_up(reason)
        for follower in self._followers:
            follower.end()
        os._exit(4)

    def check(self) -> None:
        """Raises the error of a follower that has ended, ExecutionError if one of another host is lost."""
        for follower in self._followers:
            if follower.exit_code is not None:
                follower.wait_ready()
        if (reason := self._group.failure()) is not None:
            raise ExecutionError(reason)

    @property
    def _group(self) -> Group:
        assert self.rank.group is not None, self.rank
        return self.rank.group

    def _watch(self) -> None:
        while not self._stopping.wait(CHECK_S):
            if (reason := self._group.failure()) is not None:
                self.give_up(reason)
                return
            for follower in self._followers:
                code = follower.exit_code
                if code:  # one that was told to stop ends with 0
                    self.give_up(f"{follower.name} died ({describe_exit(code)})")
                    return
