"""Notices a loop that makes no progress.

Owns the timing and one thread per running watchdog. Does not know what the loop does: the loop calls `feed` once per turn. A hard
watchdog ends the process (with `on_timeout`), a soft one only logs a warning.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.log import get_logger

logger = get_logger(__name__)


@dataclass(eq=False, slots=True)
class Watchdog:
    """Reports when `feed` has not been called for `timeout_s` seconds while enabled. timeout_s 0 = never.

    on_timeout: called once per stall, from the thread that checks. After it the watchdog waits for the next `feed`.
    """

    name: str
    timeout_s: float
    on_timeout: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    num_stalls: int = field(default=0, init=False)
    _watching: bool = field(default=True, init=False)
    _reported: bool = field(default=False, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _fed_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._fed_s = self.clock()

    def feed(self) -> None:
        self._fed_s = self.clock()
        self._reported = False

    def end(self) -> None:
        """From now on the loop may take any time, for example to wait for work."""
        self._watching = False

    def begin(self) -> None:
        """After `end`: the loop has work again."""
        self.feed()
        self._watching = True

    def check(self) -> bool:
        """Whether the loop makes no progress. At the start of a stall, logs it and calls `on_timeout`."""
        if self.timeout_s <= 0 or not self._watching:
            return False
        still_s = self.clock() - self._fed_s
        if still_s <= self.timeout_s:
            return False
        if not self._reported:
            self._reported = True
            self.num_stalls += 1
            logger.warning("%s: no progress for %.1f s (limit %.1f s)", self.name, still_s, self.timeout_s)
            self.on_timeout()
        return True

    def start(self) -> None:
        """Start a thread that checks several times per timeout. Does nothing if the timeout is 0."""
        if self.timeout_s <= 0 or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name=f"watchdog {self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._stop.wait(self.timeout_s / 4):
            self.check()
