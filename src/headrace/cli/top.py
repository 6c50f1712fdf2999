"""`headrace top`: a server's figures and requests in the terminal, again and again.

Owns the loop, the keys and the state of the terminal. What is read is in `top_reader`, the arithmetic in `top_figures`, the layout in
`top_view`. The main thread shows; a thread of its own reads, so that a server that does not answer holds up no key.
"""

import contextlib
import os
import queue
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live

from headrace.cli.top_figures import Figures, Readings, figures_of_loads
from headrace.cli.top_reader import ServerReader, Snapshot
from headrace.cli.top_view import View
from headrace.errors import ConfigError

_LEAVE = frozenset(b"qQ\x03\x04")
"""Keys that end the view: q, Ctrl-C and Ctrl-D."""

_WAKE_BYTES = 4096


def run_top(reader: ServerReader, console: Console, interval_s: float, *, once: bool = False) -> None:
    """Show the server until a key ends it, or print one view. interval_s: between two readings.

    Output that is no terminal gets one view. Raises ConfigError for one view of a server that does not answer.
    """
    if once or not console.is_terminal or console.is_dumb_terminal:
        _print_once(reader, console, interval_s)
        return
    with contextlib.suppress(KeyboardInterrupt), _ended_by_signals():
        _show(reader, console, interval_s)


def _print_once(reader: ServerReader, console: Console, interval_s: float) -> None:
    """One view, with the rates between two readings."""
    readings = Readings()
    snapshot = reader.read()
    figures = _note(snapshot, readings)
    if snapshot.metrics is not None:
        time.sleep(interval_s)
        snapshot = reader.read()
        figures = _note(snapshot, readings, of_all_time=True)
    view = View(url=reader.url, snapshot=snapshot, figures=figures, now_unix_s=time.time(), is_live=False)
    console.print(view, highlight=False)


def _note(snapshot: Snapshot, readings: Readings, *, of_all_time: bool = False) -> Figures:
    """Add a snapshot to the readings. Returns the figures, those of the loads if the server has no metrics."""
    if snapshot.metrics is not None:
        readings.add(snapshot.at_s, snapshot.metrics)
        return readings.figures(of_all_time=of_all_time)
    if snapshot.loads is not None:
        figures = figures_of_loads(snapshot.loads)
        readings.add_rate(figures.output_rate or 0.0)
        return figures
    return Figures()


def _show(reader: ServerReader, console: Console, interval_s: float) -> None:
    readings = Readings()
    view = View(url=reader.url)
    with (
        _keys() as keys,
        _wakes() as (woken, wake),
        Live(view, console=console, screen=True, auto_refresh=False) as live,
        _Poller(reader, interval_s, wake) as poller,
    ):
        live.refresh()
        while not _leaves(keys, woken):
            for found in poller.take():
                if isinstance(found, Snapshot):
                    figures = _note(found, readings)
                    view = View(
                        url=reader.url, snapshot=found, figures=figures, rates=readings.rates, now_unix_s=time.time()
                    )
                else:
                    readings.interrupt()
                    view = View(url=reader.url, problem=found)
            # Also when nothing has been read: the size of the terminal may have changed.
            live.update(view, refresh=True)


class _Poller:
    """Reads the server in a thread, and writes a byte to `wake` after each reading."""

    def __init__(self, reader: ServerReader, interval_s: float, wake: int) -> None:
        self._reader, self._interval_s, self._wake = reader, interval_s, wake
        self._found: queue.SimpleQueue[Snapshot | str] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        # Nobody waits for it: it may be in the middle of a request that has no answer.
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)

    def __enter__(self) -> "_Poller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Read no more, and do not touch `wake` any more."""
        with self._lock:
            self._stopped.set()

    def take(self) -> Iterator[Snapshot | str]:
        """What has been read since the last call: snapshots, or why there is none."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._found.get_nowait()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._found.put(self._reader.read())
            except ConfigError as error:
                self._found.put(error.message)
            with self._lock, contextlib.suppress(BlockingIOError):
                if not self._stopped.is_set():
                    os.write(self._wake, b"\0")
            self._stopped.wait(self._interval_s)


def _leaves(keys: int | None, woken: int) -> bool:
    """Wait for a key, a reading or a signal. Whether a key, or the end of the terminal, ends the view."""
    ready, _, _ = select.select([woken] if keys is None else [woken, keys], [], [])
    if woken in ready:
        os.read(woken, _WAKE_BYTES)
    if keys is None or keys not in ready:
        return False
    try:
        typed = os.read(keys, _WAKE_BYTES)
    except OSError:
        return True  # the terminal is gone
    return not typed or not _LEAVE.isdisjoint(typed)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Single keys of the terminal, not shown. None if standard input is no terminal.

    Ctrl-C is a key, too, also where a parent has left its signal ignored; Ctrl-Z does nothing, since a shell would be left on the other screen.
    """
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        yield None
        return
    single = termios.tcgetattr(descriptor)
    single[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(descriptor, termios.TCSADRAIN, single)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


@contextlib.contextmanager
def _wakes() -> Iterator[tuple[int, int]]:
    """A pipe that can be read once something has happened: its ends, (read, write). Signals write to it, and so does a new size of the terminal."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    before_fd = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    try:
        yield woken, wake
    finally:
        signal.signal(signal.SIGWINCH, before)
        signal.set_wakeup_fd(before_fd)
        os.close(woken)
        os.close(wake)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program by an exception, so that the terminal is restored."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
