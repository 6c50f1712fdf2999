"""From measured figures to ratios: ours over the best peer's, for each class of precision and preset; their tables and their plot.

Owns this arithmetic and how it is shown. Measures nothing. Pure but for the plot's file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from bench.program import table_of
from headrace.benchmark.agreement import Agreement
from headrace.benchmark.results import save_figure
from headrace.benchmark.workloads import PRESETS

RATE = "tok/s"
LATENCIES = {"TTFT p50": "ttft_s.p50", "TTFT p99": "ttft_s.p99", "ITL p50": "itl_s.p50", "ITL p99": "itl_s.p99"}
"""Latencies that are compared, and where a summary has them. ITL: between chunks."""
LATENCY_PRESETS = ("B8", "B32")

TARGETS: dict[str, dict[str, float]] = {
    "16": {"A": 1.3, "B1": 1.5, "B8": 1.5, "B32": 1.5, "C": 1.6, "Ccold": 3.0, "Cspaced": 1.5, "D": 1.25, "D8k": 1.25},
    "8": {"A": 1.8, "B1": 2.0, "B8": 2.2, "B32": 2.2, "C": 3.0, "Ccold": 3.0, "Cspaced": 1.5, "D": 2.0, "D8k": 1.8},
    "4": {"A": 2.0, "B1": 2.3, "B8": 2.2, "B32": 2.2, "C": 3.0, "Ccold": 3.0, "Cspaced": 1.5, "D": 2.0, "D8k": 1.8},
}
"""What we mean to reach at least, our rate over the best peer's, by class of precision and preset."""
COMPARED_PRESETS = list(TARGETS["16"])
LATENCY_TARGETS = {"TTFT p50": 1.0, "TTFT p99": 1.0, "ITL p50": 0.6, "ITL p99": 1.0}
"""What we mean to stay below, our latency over that of the peer with the best rate."""


_COLOURS = ("#4878a8", "#e1a43b", "#7f9f5f", "#a56a9c")


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure of one server: its median over the repetitions, lowest and highest.

    precision: its class, "16", "8" or "4". figure: RATE, of output tokens, but of prompt tokens where a preset generates one token only; or
    one of LATENCIES, in seconds. errors: requests that failed; then the figure is not comparable.
    """

    precision: str
    preset: str
    server: str
    is_ours: bool
    figure: str
    median: float
    lowest: float
    highest: float
    errors: int = 0


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of ours over that of the peer with the best rate, in one class and preset. peer is None when no peer finished without
    errors; so is ratio, also when ours had errors."""

    precision: str
    preset: str
    server: str
    figure: str
    ours: float
    peer: str | None
    theirs: float | None
    ratio: float | None
    target: float

    @property
    def is_reached(self) -> bool:
        """Whether a rate is at least the target, a latency at most; an unknown ratio is neither."""
        if self.ratio is None:
            return False
        return self.ratio >= self.target if self.figure == RATE else self.ratio <= self.target


def rate_key(preset: str) -> str:
    """Which rate of a summary counts for a preset."""
    return "prompt_throughput" if PRESETS[preset].answer.max_new_tokens == 1 else "output_throughput"


def ratios(measured: Sequence[Measured]) -> list[Ratio]:
    """One for each figure of ours, in the order of `measured`. A peer with errors is no rival."""
    return [_ratio(ours, measured) for ours in measured if ours.is_ours]


def _ratio(ours: Measured, measured: Sequence[Measured]) -> Ratio:
    place = (ours.precision, ours.preset)
    rivals = [
        m for m in measured if (m.precision, m.preset) == place and not m.is_ours and m.errors == 0 and m.median > 0
    ]
    best = max((m for m in rivals if m.figure == RATE), key=lambda m: m.median, default=None)
    theirs = next((m.median for m in rivals if best and (m.server, m.figure) == (best.server, ours.figure)), None)
    return Ratio(
        precision=ours.precision,
        preset=ours.preset,
        server=ours.server,
        figure=ours.figure,
        ours=ours.median,
        peer=best.server if best else None,
        theirs=theirs,
        ratio=ours.median / theirs if theirs and ours.errors == 0 else None,
        target=TARGETS[ours.precision][ours.preset] if ours.figure == RATE else LATENCY_TARGETS[ours.figure],
    )


def rate_table(found: Iterable[Ratio], agreements: Mapping[str, Agreement]) -> Table:
    """One row a class and preset; 80 columns wide at most. agreements: of each server with float32, which stands beside each rate."""
    table = table_of(
        "Headrace against the best peer (tok/s)",
        ("ours is", "preset"),
        ("ours", "same", "dlp", "peer", "same", "dlp", "best peer", "ratio", "goal"),
        "same, dlp: greedy texts, mean |difference of logprobs| against float32",
    )
    rows = []
    for each in found:
        if each.figure == RATE:
            cells = [each.preset, f"{each.ours:.0f}", *_exactness(agreements.get(each.server))]
            cells += [
                "-" if each.theirs is None else f"{each.theirs:.0f}",
                *_exactness(agreements.get(each.peer or "")),
            ]
            rows.append(((each.server.split()[-1],), cells + _compared(each)))
    return _filled(table, rows)


def latency_table(found: Iterable[Ratio]) -> Table:
    """One row a class, preset and latency, in milliseconds; 80 columns wide at most."""
    table = table_of(
        "Latency against the peer with the best rate (ms)",
        ("ours is", "preset", "latency"),
        ("ours", "peer", "peer is", "ratio", "at most"),
        "ITL: between chunks",
    )
    rows = []
    for each in found:
        if each.figure != RATE:
            theirs = "-" if each.theirs is None else f"{each.theirs * 1000:.0f}"
            cells = [each.figure, f"{each.ours * 1000:.0f}", theirs, *_compared(each)]
            rows.append(((each.server.split()[-1], each.preset), cells))
    return _filled(table, rows)


def _compared(each: Ratio) -> list[str]:
    """The peer, without its format, which follows from the class; the ratio and its target."""
    colour = "green" if each.is_reached else "red"
    ratio = "-" if each.ratio is None else f"{each.ratio:.2f}"
    return [each.peer.split()[0] if each.peer else "none", f"[{colour}]{ratio}[/{colour}]", f"{each.target:.2f}"]


def _filled(table: Table, rows: Iterable[tuple[tuple[str, ...], list[str]]]) -> Table:
    """rows: the first cells, which are shown once for all rows that share them, in a section of their own; and the others."""
    table.padding = 0
    last = None
    for first, cells in rows:
        if last not in (None, first):
            table.add_section()
        table.add_row(*(first if first != last else ("",) * len(first)), *cells)
        last = first
    return table


def _exactness(agreement: Agreement | None) -> tuple[str, str]:
    """Identical greedy texts, and mean |difference of logprobs| without the leading zero."""
    if agreement is None:
        return "-", "-"
    difference = agreement.logprob_difference
    texts = f"{agreement.identical}/{agreement.num_prompts}"
    return texts, "-" if difference is None else f"{difference:.3f}".removeprefix("0")


def draw(path: Path, measured: Sequence[Measured], found: Sequence[Ratio], note: str) -> None:
    """Bars of every server's rates by preset, one picture a class; above our bar its ratio. The format follows the file's ending.

    note: the machine and commit, under the title. Needs matplotlib. Raises ConfigError when it cannot be drawn or written.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Text as text: the file stays small and can be searched.
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    rates = [each for each in measured if each.figure == RATE]
    known = {(each.server, each.preset): each.ratio for each in found if each.figure == RATE}
    classes = list(dict.fromkeys(rate.precision for rate in rates))
    size = (10, 3.2 * len(classes) + 0.6)
    figure, all_axes = pyplot.subplots(len(classes), 1, figsize=size, squeeze=False, layout="constrained")
    for precision, axes in zip(classes, all_axes[:, 0], strict=True):
        mine = [rate for rate in rates if rate.precision == precision]
        presets = list(dict.fromkeys(rate.preset for rate in mine))
        servers = [server for _, server in sorted({(not rate.is_ours, rate.server) for rate in mine})]
        width = 0.8 / len(servers)
        for index, server in enumerate(servers):
            bars = [rate for rate in mine if rate.server == server]
            at = [presets.index(bar.preset) + (index - (len(servers) - 1) / 2) * width for bar in bars]
            reach = [[bar.median - bar.lowest for bar in bars], [bar.highest - bar.median for bar in bars]]
            style = {"color": _COLOURS[index % 4], "ecolor": "#333333", "capsize": 2}
            drawn = axes.bar(at, [bar.median for bar in bars], width * 0.92, yerr=reach, label=server, **style)
            labels = [_bar_label(bar.median, known.get((server, bar.preset))) for bar in bars]
            axes.bar_label(drawn, labels=labels, padding=2, fontsize=7)
        axes.set_xticks(range(len(presets)), presets)
        axes.set_ylabel("tokens per second (log)")
        axes.set_yscale("log")
        axes.margins(y=0.2)
        axes.set_title(f"{precision}-bit weights", fontsize="medium", loc="left")
        axes.legend(fontsize="small", ncols=len(servers), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(f"Output tokens per second, D: prompt tokens; ×: ours over the best peer\n{note}", fontsize="small")
    save_figure(figure, path)


def _bar_label(rate: float, ratio: float | None) -> str:
    return f"{rate:.0f}" if ratio is None else f"{rate:.0f}\n×{ratio:.2f}"
