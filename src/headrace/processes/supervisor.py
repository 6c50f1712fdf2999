"""Watches the engine's child processes and says when one has died or gone silent.

Owns one thread. Does not start, stop or restart processes, see `restarts`. `on_death` is called from this thread.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from headrace.log import get_logger

logger = get_logger(__name__)

CHECK_INTERVAL_S = 0.2
SILENCE_LIMIT_S = 5.0


class WatchedProcess(Protocol):
    """A child process."""

    @property
    def name(self) -> str:
        """What it is, for messages to people."""

    @property
    def exit_code(self) -> int | None:
        """None while it lives."""


P = TypeVar("P", bound=WatchedProcess)


class Supervisor(Generic[P]):
    """Calls `on_death` once, with a message for clients, when a process has ended that cannot be recovered.

    processes: those that live; may change meanwhile. recover: deals with a death (and takes the process out of `processes`), or returns
    False; by default no death can be recovered. heartbeat_age_s: seconds since a process was last heard, by name, None when it never was;
    silence is only logged, since a stopped process may go on, and on_silence is told once. Typical wiring: `on_death=manager.fail_all`,
    `manager.heartbeats.age_s`.
    """

    def __init__(
        self,
        processes: Sequence[P],
        on_death: Callable[[str], None],
        heartbeat_age_s: Callable[[str], float | None] = lambda name: None,
        recover: Callable[[P], bool] = lambda process: False,
        on_silence: Callable[[P], None] = lambda process: None,
    ) -> None:
        self.dead: str | None = None
        self._processes = processes
        self._on_death = on_death
        self._heartbeat_age_s = heartbeat_age_s
        self._recover = recover
        self._on_silence = on_silence
        self._silent: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

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
        for process in tuple(self._processes):
            code = process.exit_code
            if code is not None:
                logger.error("the %s process died (%s)", process.name, describe_exit(code))
                if self._recover(process):
                    continue
                self.dead = process.name
                self._on_death(f"the {process.name} process has ended unexpectedly")
                return False
            self._note_silence(process)
        return True

    def _note_silence(self, process: P) -> None:
        name = process.name
        age_s = self._heartbeat_age_s(name)
        silent = age_s is not None and age_s > SILENCE_LIMIT_S
        if silent and name not in self._silent:
            self._silent.add(name)
            logger.warning("no heartbeat from the %s process for %.1f s", name, age_s)
            self._on_silence(process)
        elif not silent and name in self._silent:
            self._silent.discard(name)
            logger.info("the %s process sends heartbeats again", name)

    def _run(self) -> None:
        while not self._stop.wait(CHECK_INTERVAL_S) and self.check():
            pass


def describe_exit(code: int) -> str:
    """An exit code in words; negative = a signal."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
