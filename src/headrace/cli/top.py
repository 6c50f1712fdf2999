"""`headrace top`: a server's load and requests in the terminal of any width, again and again.

Owns the loop, the keys, the layout and the state of the terminal; what is read is in `running_servers`. The main thread shows; a thread of its own
reads, so that a server that does not answer holds up no key.
"""

import contextlib
import math
import os
import queue
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.cli.running_servers import Load, Request, ServerReader, Snapshot
from headrace.cli.terminal import keys_unseen
from headrace.errors import ConfigError

_LEAVE = frozenset(b"qQ\x03\x04")
"""Keys that end the view: q, Ctrl-C and Ctrl-D."""

_TICK_S = 0.05
"""How often a new reading and the size of the terminal are looked at."""

_MAX_RATES = 240
"""Most rates to keep for the plot."""

MAX_WIDTH = 100
"""Columns that the plot takes at most."""
DETAILS_WIDTH = 80
"""Adapters, keys and replicas of requests are listed from this width on."""
MAX_LISTED = 20
"""Most requests to list where the height is not limited."""
_FULL = 0.95
"""The KV cache counts as full beyond this share, as in deploy/alerts.yaml."""
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "._-~=+*#"
_STYLES = {"running": "green", "waiting": "yellow", "abort": "red", "refused": "red"}


def run_top(reader: ServerReader, console: Console, interval_s: float, *, once: bool = False) -> None:
    """Show the server until a key ends it, or print one view. interval_s: between two readings.

    Output that is no terminal gets one view. Raises ConfigError for one view of a server that does not answer.
    """
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(View(url=reader.url, snapshot=reader.read(), is_live=False), highlight=False)
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        # An exception, so that the terminal is restored.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that is shown. snapshot: None while no server answers, and `problem` says why.

    rates: of output tokens, the latest last. is_live: it will be shown again, and a key ends it.
    """

    url: str
    snapshot: Snapshot | None = None
    rates: Sequence[float] = ()
    problem: str = ""
    is_live: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich. Lists as many requests as the height has room for."""
        top = Group(*self._top(options))
        yield top
        if self.snapshot is None or self.snapshot.requests is None:
            return
        room = MAX_LISTED
        if self.is_live and options.height is not None:
            used = len(console.render_lines(top, options.update(height=None), pad=False))
            room = options.height - used - 2  # an empty line and the names of the columns
        if room > 0:
            yield Text()
            details = ["adapter", "key"] if options.max_width >= DETAILS_WIDTH else []
            if details and len(self.snapshot.loads or ()) > 1:
                details.append("replica")
            yield _request_table(self.snapshot.requests[:room], details)

    def _top(self, options: ConsoleOptions) -> Iterable[RenderableType]:
        shown = self.snapshot or Snapshot(problem=self.problem)
        words = [shown.model, f"Headrace {shown.version}" if shown.version else "", self.url]
        parts = [*(printable(word) for word in words if word), *(["q quits"] if self.is_live else [])]
        yield Text((" | " if options.ascii_only else " · ").join(parts), no_wrap=True, overflow="ellipsis")
        yield Text()
        if self.snapshot is None:
            yield Text(f"waiting for {printable(self.url)}", style="yellow")
        if shown.loads is not None:
            plot = sparkline(self.rates, min(options.max_width, MAX_WIDTH) - 20, is_ascii=options.ascii_only)
            yield _figure_table(shown.loads, shown.requests or (), plot)
            if len(shown.loads) > 1:
                yield Text()
                yield _replica_table(shown.loads)
        if shown.problem:
            yield Text(printable(shown.problem), style="yellow")
        elif shown.loads is None or shown.requests is None:
            yield Text("Load and requests need an API key (--api-key).", style="dim")


def _figure_table(loads: Sequence[Load], requests: Sequence[Request], plot: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    num_waiting = sum(load.num_waiting for load in loads)
    waits = Text(f"{count(num_waiting)} waiting", style="yellow" if num_waiting else "")
    table.add_row("requests", Text(f"{count(sum(load.num_running_reqs for load in loads))} running, ") + waits)
    table.add_row("tokens/s", f"{count(sum(load.gen_throughput for load in loads))} out")
    if plot:
        table.add_row("", Text(plot, style="cyan", no_wrap=True))
    usage = sum(load.token_usage for load in loads) / (len(loads) or 1)
    hits = sum(load.cache_hit_rate for load in loads) / (len(loads) or 1)
    bar = Table.grid(padding=(0, 2, 0, 0))
    style = "red" if usage > _FULL else "cyan"
    bar.add_row(percent(usage), ProgressBar(total=1.0, completed=usage, width=24, complete_style=style))
    table.add_row("KV cache", bar)
    table.add_row("prefix hits", Text(percent(hits)).append("  (since start)", style="dim"))
    started = [(each, each.ttft_s) for each in requests if each.ttft_s is not None]
    table.add_row("first token", latency([first_s for _, first_s in started]))
    gaps = [
        (each.e2e_s - first_s) / (each.completion_tokens - 1)
        for each, first_s in started
        if each.e2e_s is not None and each.completion_tokens > 1
    ]
    table.add_row("between tokens", latency(gaps))
    return table


def _table(*columns: str, right: str) -> Table:
    """A table without lines. right: the columns of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right.split() else "left", no_wrap=name != "request")
    return table


def _replica_table(loads: Iterable[Load]) -> Table:
    columns = ("replica", "running", "waiting", "KV", "hits", "tokens/s")
    table = _table(*columns, right=" ".join(columns))
    for load in loads:
        counts = (load.dp_rank, load.num_running_reqs, load.num_waiting)
        shares = (load.token_usage, load.cache_hit_rate)
        table.add_row(*map(count, counts), *map(percent, shares), count(load.gen_throughput))
    return table


def _request_table(requests: Sequence[Request], details: Sequence[str]) -> RenderableType:
    """The requests, with those details that some have. Where room is short, ids are cut."""
    if not requests:
        return Text("no requests yet", style="dim")
    known = [_details(each) for each in requests]
    details = [name for name in details if any(each[name] for each in known)]
    table = _table("request", "state", "age", "in", "out", *details, right="age in out replica")
    for each, about in zip(requests, known, strict=True):
        outcome = printable(each.finish_reason or each.state)
        table.add_row(
            Text(printable(each.rid), no_wrap=True, overflow="ellipsis"),
            Text(outcome, style=_STYLES.get(outcome, "dim")),
            duration(each.age_s),
            count(each.prompt_tokens),
            count(each.completion_tokens),
            *(Text(about[name]) for name in details),
        )
    return table


def _details(one: Request) -> dict[str, str]:
    replica = "" if one.dp_rank is None else str(one.dp_rank)
    return {"adapter": printable(one.adapter or ""), "key": printable(one.key or ""), "replica": replica}


def count(value: float) -> str:
    """0.42, 42, 12.3k, 1.23M"""
    for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if value >= least:
            return f"{_digits(value / size)}{unit}"
    return str(int(value)) if value == int(value) else _digits(value)


def percent(share: float) -> str:
    """42 %"""
    return f"{_digits(100 * share)} %"


def latency(seconds: Sequence[float]) -> str:
    """median 12 ms, p95 40 ms  (last 32)"""
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    median, high = (duration(ordered[round(share * (len(ordered) - 1))]) for share in (0.5, 0.95))
    return f"median {median}, p95 {high}  (last {len(ordered)})"


def duration(seconds: float) -> str:
    """3 ms, 1.25 s, 4 min 5 s, 3 h 12 min, 2 d 5 h"""
    whole = int(seconds)
    if seconds < 60:
        return f"{_digits(seconds)} s" if seconds >= 1 else f"{_digits(1000 * seconds)} ms"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return (
        f"{whole // 3600} h {whole % 3600 // 60} min"
        if whole < 86400
        else f"{whole // 86400} d {whole % 86400 // 3600} h"
    )


def _digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def sparkline(values: Sequence[float], width: int, *, is_ascii: bool = False) -> str:
    """The last `width` values as blocks, the highest as a full one. Empty for fewer than two values."""
    shown = list(values)[-max(0, width) :] if width > 0 else []
    if len(shown) < 2:
        return ""
    blocks, most = _ASCII_BLOCKS if is_ascii else _BLOCKS, max(shown)
    # Only what is zero gets the lowest block.
    return "".join(blocks[math.ceil(value / most * (len(blocks) - 1)) if most else 0] for value in shown)


def printable(text: str) -> str:
    """The text without what could command a terminal: clients choose the ids of requests."""
    return "".join(char if char.isprintable() else "?" for char in text)
