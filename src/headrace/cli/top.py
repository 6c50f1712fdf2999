"""`headrace top`: a server's load and requests in the terminal, again and again.

Owns the loop, the keys and the state of the terminal. What is read is in `top_reader`, the layout in `top_view`. The main thread shows; a
thread of its own reads, so that a server that does not answer holds up no key.
"""

import contextlib
import os
import queue
import select
import signal
import threading
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.live import Live

from headrace.cli.top_reader import ServerReader, Snapshot
from headrace.cli.top_view import View
from headrace.cli.typed_input import keys_unseen
from headrace.errors import ConfigError

_LEAVE = frozenset(b"qQ\x03\x04")
"""Keys that end the view: q, Ctrl-C and Ctrl-D."""

_TICK_S = 0.05
"""How often a new reading and the size of the terminal are looked at."""

_MAX_RATES = 240
"""Most rates to keep for the plot."""


def run_top(reader: ServerReader, console: Console, interval_s: float, *, once: bool = False) -> None:
    """Show the server until a key ends it, or print one view. interval_s: between two readings.

    Output that is no terminal gets one view. Raises ConfigError for one view of a server that does not answer.
    """
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(View(url=reader.url, snapshot=reader.read(), is_live=False), highlight=False)
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # an exception, so that the terminal is restored
    with contextlib.suppress(KeyboardInterrupt):
        _show(reader, console, interval_s)


def _show(reader: ServerReader, console: Console, interval_s: float) -> None:
    rates: deque[float] = deque(maxlen=_MAX_RATES)
    view, size = View(url=reader.url), console.size
    with (
        keys_unseen(has_signals=False) as keys,
        Live(view, console=console, screen=True, auto_refresh=False) as live,
        _readings(reader, interval_s) as found,
    ):
        live.refresh()
        while not _leaves(keys):
            if found.empty() and console.size == size:
                continue
            size = console.size
            while not found.empty():
                read = found.get()
                if isinstance(read, Snapshot):
                    rates.append(sum(load.gen_throughput for load in read.loads or ()))
                    view = View(url=reader.url, snapshot=read, rates=rates)
                else:
                    view = View(url=reader.url, problem=read)
            live.update(view, refresh=True)


@contextlib.contextmanager
def _readings(reader: ServerReader, interval_s: float) -> Iterator["queue.SimpleQueue[Snapshot | str]"]:
    """Reads the server in a thread: snapshots, or why there is none."""
    found: queue.SimpleQueue[Snapshot | str] = queue.SimpleQueue()
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            try:
                found.put(reader.read())
            except ConfigError as error:
                found.put(error.message)
            stopped.wait(interval_s)

    # Nobody waits for it: it may be in the middle of a request that has no answer.
    threading.Thread(target=run, name="top", daemon=True).start()
    try:
        yield found
    finally:
        stopped.set()


def _leaves(keys: int | None) -> bool:
    """Wait a moment for a key. Whether one, or the end of the terminal, ends the view."""
    ready, _, _ = select.select([] if keys is None else [keys], [], [], _TICK_S)
    if keys is None or not ready:
        return False
    try:
        typed = os.read(keys, 4096)
    except OSError:
        return True  # the terminal is gone
    return not typed or not _LEAVE.isdisjoint(typed)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
