"""How `headrace top` shows a server: text for a terminal of any width.

Owns the layout and the wording. What is shown comes from `top_figures` and `top_reader`; nothing here asks a server or a clock.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.cli.top_figures import WINDOW_S, Figures, Load
from headrace.cli.top_reader import Request, Snapshot, State

MAX_WIDTH = 100
"""Columns that the figures take at most; the tables may be wider."""
BAR_WIDTH = 24
_FULL = 0.95
"""The KV cache counts as full beyond this share, as in deploy/alerts.yaml."""
_HINT = "q quits"
_GAP = 2
_LEAST_ID = 12
"""Columns that an id gets at least, if it needs them."""
MAX_LISTED = 20
"""Most requests to list where the height is not limited."""

_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "._-~=+*#"
_NOT_KNOWN, _ASCII_NOT_KNOWN = "–", "-"
_STYLES = {"running": "green", "waiting": "yellow", "abort": "red", "refused": "red"}
_NEEDS_KEY = "Requests and replicas need an API key (--api-key), the scheduler's counters the admin key."
_ADMIN_ONLY = "The scheduler's counters and the requests of other keys need the admin key."
_NO_METRICS = "The server runs with --disable-metrics: there are no latencies, and no tokens/s of prompts."


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that is shown. snapshot: None while no server answers, and `problem` says why.

    rates: of output tokens, the latest last. now_unix_s: for the server's age. is_live: it will be shown again, and a key ends it.
    """

    url: str
    snapshot: Snapshot | None = None
    figures: Figures = field(default_factory=Figures)
    rates: Sequence[float] = ()
    now_unix_s: float = 0.0
    problem: str = ""
    is_live: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich. Lists as many requests as the height has room for."""
        text = _Texts(is_ascii=options.ascii_only)
        if self.snapshot is None:
            yield Group(*self._title(text, options.max_width), Text(), *self._waiting())
            return
        top = Group(*self._top(self.snapshot, text, options.max_width))
        yield top
        requests = self.snapshot.requests
        if requests is None:
            return
        room = MAX_LISTED
        if self.is_live and options.height is not None:
            used = len(console.render_lines(top, options.update(height=None), pad=False))
            room = options.height - used - 2  # an empty line and the names of the columns
        if room > 0:
            yield Text()
            yield _request_table(requests[:room], text, options.max_width, has_replicas=_has_replicas(self.snapshot))

    def _waiting(self) -> Iterable[RenderableType]:
        yield Text(f"waiting for {printable(self.url)}", style="yellow")
        if self.problem:
            yield Text(printable(self.problem), style="dim")

    def _title(self, text: "_Texts", width: int) -> Iterable[Text]:
        """One line, or two where the address has no room in the first."""
        shown, hint = self.snapshot, _HINT if self.is_live else ""
        words = [] if shown is None else [shown.model, f"Headrace {shown.version}" if shown.version else ""]
        if shown is not None and shown.started_unix_s:
            words.append(f"up {text.duration(max(0.0, self.now_unix_s - shown.started_unix_s))}")
        parts, url = [printable(word) for word in words if word], printable(self.url)
        title = Text(f" {text.dot} ".join([*parts, url]), no_wrap=True, overflow="ellipsis")
        room = width - len(hint)
        fits = title.cell_len + _GAP <= room or not parts
        if not fits:
            title = Text(f" {text.dot} ".join(parts), no_wrap=True, overflow="ellipsis")
        if shown is not None and shown.model:
            title.stylize("bold", 0, len(parts[0]))
        if hint:
            title.truncate(max(0, room - _GAP), overflow="ellipsis", pad=True)
            title.pad_right(_GAP)
            title.append(hint, style="dim")
        yield title
        if not fits:
            yield Text(url, no_wrap=True, overflow="ellipsis")

    def _top(self, shown: Snapshot, text: "_Texts", width: int) -> Iterable[RenderableType]:
        yield from self._title(text, width)
        yield Text()
        yield _figure_table(self, shown, text, min(width, MAX_WIDTH))
        if shown.loads is not None and _has_replicas(shown):
            yield Text()
            yield _replica_table(shown.loads, text)
        notes = list(_notes(shown))
        if notes:
            yield Text()
            yield from (Text(note, style=style) for note, style in notes)


def _notes(shown: Snapshot) -> Iterable[tuple[str, str]]:
    """What is missing and why, each with its style."""
    if shown.state is not None and shown.state.paused:
        yield f"Generation is paused ({printable(shown.state.paused)}).", "yellow"
    if not shown.has_metrics:
        yield _NO_METRICS, "yellow"
    if shown.problem:
        yield printable(shown.problem), "yellow"
    elif shown.loads is None or shown.requests is None:
        yield _NEEDS_KEY, "dim"
    elif shown.state is None:
        yield _ADMIN_ONLY, "dim"


def _figure_table(view: View, shown: Snapshot, text: "_Texts", width: int) -> Table:
    figures = view.figures
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    running, waiting = text.count(figures.num_running), text.count(figures.num_waiting)
    waits = Text(f"{waiting} waiting", style="yellow" if figures.num_waiting else "")
    table.add_row("requests", Text(f"{running} running, ").append_text(waits))
    rates = Text(f"{text.count(figures.output_rate)} out, {text.count(figures.prompt_rate)} in")
    table.add_row("tokens/s", rates)
    if plot := sparkline(view.rates, width - 20, is_ascii=text.is_ascii):
        table.add_row("", Text(plot, style="cyan", no_wrap=True))
    table.add_row("KV cache", _bar(figures.kv_share, text))
    period = f"last {WINDOW_S:.0f} s" if view.is_live else "since start"
    hits_period = period if shown.metrics is not None else "since start"
    table.add_row("prefix hits", _with_period(text.percent(figures.hit_rate), hits_period, figures.hit_rate))
    if shown.has_metrics:
        for name, found in (("first token", figures.ttft_s), ("between tokens", figures.itl_s)):
            table.add_row(name, _with_period(text.latency(found), period, found))
    if shown.state is not None:
        table.add_row("scheduler", _counters(shown.state, text))
    return table


def _with_period(words: str, period: str, value: object) -> Text:
    return Text(words).append(f"  ({period})" if value is not None else "", style="dim")


def _bar(share: float | None, text: "_Texts") -> RenderableType:
    if share is None:
        return text.percent(None)
    line = Table.grid(padding=(0, _GAP, 0, 0))
    style = "red" if share > _FULL else "cyan"
    line.add_row(text.percent(share), ProgressBar(total=1.0, completed=share, width=BAR_WIDTH, complete_style=style))
    return line


def _counters(state: State, text: "_Texts") -> str:
    counts = {
        "finished": state.num_finished,
        "aborted": state.num_aborted,
        "retracted": state.num_retracted,
        "steps": state.num_steps,
        "sessions": state.frontend.num_sessions,
        "restarts": state.frontend.num_restarts,
    }
    return ", ".join(f"{name} {text.count(count)}" for name, count in counts.items() if count) or text.none


def _table() -> Table:
    """A table without lines."""
    return Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")


def _has_replicas(shown: Snapshot) -> bool:
    return shown.loads is not None and len(shown.loads) > 1


def _replica_table(loads: Iterable[Load], text: "_Texts") -> Table:
    table = _table()
    for name in ("replica", "running", "waiting", "KV", "hits", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for load in loads:
        table.add_row(
            str(load.dp_rank),
            text.count(load.num_running_reqs),
            text.count(load.num_waiting),
            text.percent(load.kv_share),
            text.percent(load.cache_hit_rate),
            text.count(load.gen_throughput),
        )
    return table


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the list of requests. is_number: its cells stand at the right."""

    name: str
    cells: list[Text]
    is_number: bool = False

    @property
    def width(self) -> int:
        """What it needs on the screen, with the gap before it."""
        return _GAP + max(cell_len(self.name), *(cell.cell_len for cell in self.cells))


def _request_table(requests: Sequence[Request], text: "_Texts", width: int, *, has_replicas: bool) -> RenderableType:
    """The requests in at most `width` columns of the terminal: ids are cut first, and details without room are left out."""
    if not requests:
        return Text("no requests yet", style="dim")
    outcomes = [printable(each.finish_reason or each.state) for each in requests]
    columns = [
        _Column("state", [Text(outcome, style=_STYLES.get(outcome, "dim")) for outcome in outcomes]),
        _Column("age", [Text(text.duration(each.age_s)) for each in requests], is_number=True),
        _Column("in", [Text(text.count(each.prompt_tokens)) for each in requests], is_number=True),
        _Column("out", [Text(text.count(each.completion_tokens)) for each in requests], is_number=True),
    ]
    ids = [Text(printable(each.rid), no_wrap=True, overflow="ellipsis") for each in requests]
    room = width - sum(column.width for column in columns) - min(_LEAST_ID, max(id.cell_len for id in ids))
    details = [
        _Column("adapter", [Text(printable(each.adapter or "")) for each in requests]),
        _Column("key", [Text(printable(each.key or "")) for each in requests]),
    ]
    if has_replicas:
        replicas = [Text("" if each.dp_rank is None else str(each.dp_rank)) for each in requests]
        details.append(_Column("replica", replicas, is_number=True))
    for column in details:
        if any(cell.plain for cell in column.cells) and column.width <= room:
            room -= column.width
            columns.append(column)
    table = _table()
    table.add_column("request")
    for column in columns:
        table.add_column(column.name, justify="right" if column.is_number else "left", no_wrap=True)
    for row in zip(ids, *(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


@dataclass(frozen=True, slots=True)
class _Texts:
    """Values as short texts. is_ascii: for a terminal that has nothing else."""

    is_ascii: bool = False

    @property
    def none(self) -> str:
        """What is not known."""
        return _ASCII_NOT_KNOWN if self.is_ascii else _NOT_KNOWN

    @property
    def dot(self) -> str:
        """Stands between the parts of a line."""
        return "|" if self.is_ascii else "·"

    def count(self, value: float | None) -> str:
        """0.42, 42, 12.3k, 1.23M"""
        if value is None:
            return self.none
        for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
            if value >= least:
                return f"{_digits(value / size)}{unit}"
        return str(int(value)) if value == int(value) else _digits(value)

    def percent(self, share: float | None) -> str:
        """42 %"""
        return self.none if share is None else f"{_digits(100 * share)} %"

    def latency(self, found: Sequence[float] | None) -> str:
        """median 12 ms, p95 40 ms"""
        if found is None:
            return self.none
        median, high = found
        return f"median {self.duration(median)}, p95 {self.duration(high)}"

    def duration(self, seconds: float) -> str:
        """3 ms, 1.25 s, 4 min 5 s, 3 h 12 min, 2 d 5 h"""
        whole = int(seconds)
        if seconds < 1:
            return f"{_digits(1000 * seconds)} ms"
        if seconds < 60:
            return f"{_digits(seconds)} s"
        if whole < 3600:
            return f"{whole // 60} min {whole % 60} s"
        if whole < 86400:
            return f"{whole // 3600} h {whole % 3600 // 60} min"
        return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def sparkline(values: Sequence[float], width: int, *, is_ascii: bool = False) -> str:
    """The last `width` values as blocks, the highest as a full one. Empty for fewer than two values."""
    shown = list(values)[-max(0, width) :] if width > 0 else []
    if len(shown) < 2:
        return ""
    blocks = _ASCII_BLOCKS if is_ascii else _BLOCKS
    most = max(shown)
    # Only what is zero gets the lowest block.
    return "".join(blocks[math.ceil(value / most * (len(blocks) - 1)) if most else 0] for value in shown)


def printable(text: str) -> str:
    """The text without what could command a terminal: clients choose the ids of requests."""
    return "".join(char if char.isprintable() else "?" for char in text)
