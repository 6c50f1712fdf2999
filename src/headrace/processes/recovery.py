"""Starts a dead child process again, a bounded number of times.

Owns one thread per restart under way, and the budget of restarts. Does not notice deaths (`supervisor` does, and calls `recover` from
its thread), does not know how a process is made, and replays nothing (`frontend.engine_link` does, in the event loop).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from headrace.errors import ConfigError, HeadraceError, ModelError
from headrace.log import get_logger

logger = get_logger(__name__)

WINDOW_S = 600.0
"""The window of --max-restarts: restarts longer ago than this many seconds do not count."""


class RestartableProcess(Protocol):
    """A child process as this module sees it."""

    @property
    def name(self) -> str:
        """What it is, for messages to people."""

    @property
    def exit_code(self) -> int | None:
        """None while it lives."""

    def wait_ready(
        self,
        on_progress: Callable[[int, int], None] = ...,
        should_stop: Callable[[], bool] = ...,
    ) -> object:
        """Wait until it can serve. Raises HeadraceError when it cannot, or when `should_stop` returns True."""

    def kill(self) -> None:
        """End it now and release what it held here. Idempotent."""


P = TypeVar("P", bound=RestartableProcess)


class _DiedAgain(HeadraceError):
    """The new process died before it served, and `recover` is starting another one already."""


class RestartBudget:
    """At most `max_restarts` within any `WINDOW_S` seconds."""

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = max_restarts
        self._clock = clock
        self._taken: deque[float] = deque()

    def take(self) -> bool:
        """Count a restart; False when there have been too many."""
        now = self._clock()
        while self._taken and self._taken[0] <= now - WINDOW_S:
            self._taken.popleft()
        if len(self._taken) >= self._max:
            return False
        self._taken.append(now)
        return True


class Recovery(Generic[P]):
    """Restarts of a set of processes. Callbacks are called from threads.

    children: the live processes, shared with the supervisor; a dead one is taken out, its replacement put in when it can serve.
    respawn: starts a process in place of a dead one. on_down: a process is out of service. on_up: its replacement can serve; raises
    HeadraceError when the replacement cannot be put into service.
    on_failure: there have been too many restarts. on_refused: the options or the model made the start fail, so another one would fail as
    well. Both get the dead process and a message for clients. start_limit_s: a start that takes longer has failed; 0 = no limit.
    """

    def __init__(
        self,
        children: list[P],
        budget: RestartBudget,
        respawn: Callable[[P], P],
        on_down: Callable[[P], None],
        on_up: Callable[[P], None],
        on_failure: Callable[[P, str], None],
        on_refused: Callable[[P, str], None],
        start_limit_s: float,
    ) -> None:
        self._children = children
        self._budget = budget
        self._respawn = respawn
        self._on_down = on_down
        self._on_up = on_up
        self._on_failure = on_failure
        self._on_refused = on_refused
        self._start_limit_s = start_limit_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def recover(self, dead: P) -> bool:
        """Deal with a death. False: there have been too many, or we are stopping."""
        if self._stopping.is_set():
            return False
        with self._lock:
            if dead not in self._children:
                return True  # whoever started it has seen it too
            if not self._budget.take():
                return False
            self._children.remove(dead)
        dead.kill()
        self._on_down(dead)
        thread = threading.Thread(target=self._restart, args=(dead,), name=f"restart {dead.name}", daemon=True)
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()
        return True

    def retire(self, dead: P) -> None:
        """Take a dead process out of service without starting another."""
        if self._take_out(dead):
            dead.kill()
            self._on_down(dead)

    def stop(self) -> None:
        """Start no more processes, and end those that are starting. Idempotent; from any thread."""
        self._stopping.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _restart(self, dead: P) -> None:
        begin = time.monotonic()
        while True:
            process = self._respawn(dead)
            error = self._why_not_ready(process)
            if self._stopping.is_set():
                process.kill()
                return
            if error is None:
                error = self._put_into_service(process)
            if error is None:
                logger.warning("the %s process is back after %.1f s", process.name, time.monotonic() - begin)
                return
            if isinstance(error, _DiedAgain):
                logger.warning("%s", error.message)
                return
            process.kill()
            logger.error("the %s process could not be restarted: %s", process.name, error.message)
            message = f"the {process.name} process has died and could not be restarted"
            # What is wrong with the options or the model will be wrong the next time.
            if isinstance(error, ConfigError | ModelError):
                self._on_refused(process, message)
                return
            if not self._budget.take():
                self._on_failure(process, message)
                return

    def _put_into_service(self, process: P) -> HeadraceError | None:
        # Watched from now on: if it dies meanwhile, `recover` deals with it.
        self._children.append(process)
        try:
            self._on_up(process)
        except HeadraceError as error:
            if not self._take_out(process):
                return _DiedAgain(f"the {process.name} process died before it was in service: {error.message}")
            return error
        return None

    def _take_out(self, process: P) -> bool:
        """Whether it was still among the children. The supervisor and a restart may both see a death; only one of them deals with it."""
        with self._lock:
            if process not in self._children:
                return False
            self._children.remove(process)
            return True

    def _why_not_ready(self, process: P) -> HeadraceError | None:
        end_s = time.monotonic() + self._start_limit_s

        def should_stop() -> bool:
            return self._stopping.is_set() or (self._start_limit_s > 0 and time.monotonic() > end_s)

        try:
            process.wait_ready(should_stop=should_stop)
        except HeadraceError as error:
            return error
        return None
