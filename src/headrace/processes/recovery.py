"""Notices that a child process has died or gone silent (`Supervisor`), and starts another a bounded number of times (`Recovery`).

Owns one thread that watches, one per restart under way, and the budget of restarts. Does not know how a process is made, and replays nothing
(`frontend.engine_link` does, in the event loop). Callbacks are called from these threads.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import ConfigError, HeadraceError, ModelError
from headrace.log import get_logger
from headrace.processes.child import ChildProcess

logger = get_logger(__name__)

CHECK_INTERVAL_S = 0.2
SILENCE_LIMIT_S = 5.0
WINDOW_S = 600.0
"""The window of --max-restarts: restarts longer ago than this many seconds do not count."""


@dataclass(eq=False, slots=True)
class Supervisor:
    """Calls `on_death` once, with a message for clients, when a process has ended that cannot be recovered.

    processes: those that live; may change meanwhile. recover: deals with a death (and takes the process out of `processes`), or returns
    False; by default no death can be recovered. heartbeat_age_s: seconds since a process was last heard, by name, None when it never was;
    silence is only logged, since a stopped process may go on, and on_silence is told once. Typical wiring: `on_death=manager.fail_all`,
    `manager.heartbeats.age_s`.
    """

    processes: Sequence[ChildProcess]
    on_death: Callable[[str], None]
    heartbeat_age_s: Callable[[str], float | None] = lambda name: None
    recover: Callable[[ChildProcess], bool] = lambda process: False
    on_silence: Callable[[ChildProcess], None] = lambda process: None
    dead: str | None = field(default=None, init=False)
    _silent: set[str] = field(default_factory=set, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        """Watch from a thread until `stop`, or until a process has died."""
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Processes may end from now on. Idempotent; from any thread, also from within `on_death`."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def check(self) -> bool:
        """Look once. True when all processes live."""
        if self.dead is not None:
            return False
        for process in tuple(self.processes):
            code = process.exit_code
            if code is not None:
                logger.error("the %s process died (%s)", process.name, describe_exit(code))
                if self.recover(process):
                    continue
                self.dead = process.name
                self.on_death(f"the {process.name} process has ended unexpectedly")
                return False
            self._note_silence(process)
        return True

    def _note_silence(self, process: ChildProcess) -> None:
        name = process.name
        age_s = self.heartbeat_age_s(name)
        silent = age_s is not None and age_s > SILENCE_LIMIT_S
        if silent and name not in self._silent:
            self._silent.add(name)
            logger.warning("no heartbeat from the %s process for %.1f s", name, age_s)
            self.on_silence(process)
        elif not silent and name in self._silent:
            self._silent.discard(name)
            logger.info("the %s process sends heartbeats again", name)

    def _run(self) -> None:
        while not self._stop.wait(CHECK_INTERVAL_S) and self.check():
            pass


def describe_exit(code: int) -> str:
    """An exit code in words; negative = a signal."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


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


@dataclass(eq=False, slots=True)
class Recovery:
    """Restarts of a set of processes.

    children: the live processes, shared with the supervisor; a dead one is taken out, its replacement put in when it can serve.
    respawn: starts a process in place of a dead one. on_down: a process is out of service. on_up: its replacement can serve; raises
    HeadraceError when the replacement cannot be put into service.
    on_failure: there have been too many restarts. on_refused: the options or the model made the start fail, so another one would fail as
    well; gets the error, too. Both get the dead process and a message for clients. may_start_otherwise: whether a start of which this is the error
    is to be tried once more; then `respawn` does it in another way. start_limit_s: a start that takes longer has failed; 0 = no limit.
    """

    children: list[ChildProcess]
    budget: RestartBudget
    respawn: Callable[[ChildProcess], ChildProcess]
    on_down: Callable[[ChildProcess], object]
    on_up: Callable[[ChildProcess], None]
    on_failure: Callable[[ChildProcess, str], None]
    on_refused: Callable[[ChildProcess, str, HeadraceError], None]
    start_limit_s: float
    may_start_otherwise: Callable[[ChildProcess, HeadraceError], bool] = lambda process, error: False
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False)

    def recover(self, dead: ChildProcess) -> bool:
        """Deal with a death. False: there have been too many, or we are stopping."""
        if self._stopping.is_set():
            return False
        with self._lock:
            if dead not in self.children:
                return True  # whoever started it has seen it too
            if not self.budget.take():
                return False
            self.children.remove(dead)
        dead.kill()
        self.on_down(dead)
        self._begin(dead)
        return True

    def revive(self, refused: Sequence[ChildProcess]) -> None:
        """Start others in place of those that were refused or retired, and wait until they serve, or are refused again."""
        for thread in [self._begin(dead) for dead in refused]:
            thread.join()

    def retire(self, dead: ChildProcess) -> None:
        """Take a dead process out of service without starting another."""
        if self._take_out(dead):
            dead.kill()
            self.on_down(dead)

    def stop(self) -> None:
        """Start no more processes, and end those that are starting. Idempotent; from any thread."""
        self._stopping.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _begin(self, dead: ChildProcess) -> threading.Thread:
        thread = threading.Thread(target=self._restart, args=(dead,), name=f"restart {dead.name}", daemon=True)
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()
        return thread

    def _restart(self, dead: ChildProcess) -> None:
        begin = time.monotonic()
        while True:
            process = self.respawn(dead)
            error = self._why_not_ready(process)
            if self._stopping.is_set():
                process.kill()
                return
            if error is None:
                error = self._put_into_service(process)
            elif self.may_start_otherwise(process, error):
                process.kill()
                logger.warning("the %s process starts in another way: %s", process.name, error.message)
                continue
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
                self.on_refused(process, message, error)
                return
            if not self.budget.take():
                self.on_failure(process, message)
                return

    def _put_into_service(self, process: ChildProcess) -> HeadraceError | None:
        # Watched from now on: if it dies meanwhile, `recover` deals with it.
        self.children.append(process)
        try:
            self.on_up(process)
        except HeadraceError as error:
            if not self._take_out(process):
                return _DiedAgain(f"the {process.name} process died before it was in service: {error.message}")
            return error
        return None

    def _take_out(self, process: ChildProcess) -> bool:
        """Whether it was still among the children. The supervisor and a restart may both see a death; only one of them deals with it."""
        with self._lock:
            is_there = process in self.children
            if is_there:
                self.children.remove(process)
            return is_there

    def _why_not_ready(self, process: ChildProcess) -> HeadraceError | None:
        end_s = time.monotonic() + self.start_limit_s

        def should_stop() -> bool:
            return self._stopping.is_set() or (self.start_limit_s > 0 and time.monotonic() > end_s)

        try:
            process.wait_ready(should_stop=should_stop)
        except HeadraceError as error:
            return error
        return None
