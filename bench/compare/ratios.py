"""From measured figures to ratios: ours over the best peer's, for each class of precision and preset; their tables and their plot.

Owns this arithmetic and how it is shown. Measures nothing. Pure but for the plot's file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from headrace.benchmark.agreement import Agreement
from headrace.benchmark.results import save_figure
from headrace.benchmark.workloads import PRESETS

RATE = "tok/s"
LATENCIES = {
    "TTFT p50": ("ttft_s", "p50"),
    "TTFT p99": ("ttft_s", "p99"),
    "ITL p50": ("itl_s", "p50"),
    "ITL p99": ("itl_s", "p99"),
}
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
    table = _table(
        "Headrace against the best peer (tok/s)",
        "same, dlp: greedy texts, mean |difference of logprobs| against float32",
    )
    for name in ("ours is", "preset"):
        table.add_column(name, style="bold cyan", no_wrap=True)
    for name in ("ours", "same", "dlp", "peer", "same", "dlp"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best peer", no_wrap=True)
    for name in ("ratio", "goal"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for each in found:
        if each.figure != RATE:
            continue
        if last not in (None, each.server):
            table.add_section()
        table.add_row(
            each.server.split()[-1] if each.server != last else "",
            each.preset,
            f"{each.ours:.0f}",
            *_exactness(agreements.get(each.server)),
            "-" if each.theirs is None else f"{each.theirs:.0f}",
            *_exactness(agreements.get(each.peer or "")),
            _short(each.peer),
            _coloured(each, "-" if each.ratio is None else f"{each.ratio:.2f}"),
            f"{each.target:.2f}",
        )
        last = each.server
    return table


def latency_table(found: Iterable[Ratio]) -> Table:
    """One row a class, preset and latency, in milliseconds; 80 columns wide at most."""
    table = _table("Latency against the peer with the best rate (ms)", "ITL: between chunks")
    for name in ("ours is", "preset", "latency"):
        table.add_column(name, style="bold cyan", no_wrap=True)
    for name in ("ours", "peer"):
        table.add_column(name, justify="right")
    table.add_column("peer is", no_wrap=True)
    for name in ("ratio", "at most"):
        table.add_column(name, justify="right", no_wrap=True)
    last: tuple[str, str] | None = None
    for each in found:
        if each.figure == RATE:
            continue
        place = (each.server, each.preset)
        if last not in (None, place):
            table.add_section()
        table.add_row(
            *((each.server.split()[-1], each.preset) if place != last else ("", "")),
            each.figure,
            f"{each.ours * 1000:.0f}",
            "-" if each.theirs is None else f"{each.theirs * 1000:.0f}",
            _short(each.peer),
            _coloured(each, "-" if each.ratio is None else f"{each.ratio:.2f}"),
            f"{each.target:.2f}",
        )
        last = place
    return table


def _table(title: str, caption: str) -> Table:
    return Table(
        title=title, title_justify="left", caption=caption, caption_justify="left", header_style="bold",
        box=SIMPLE_HEAD, padding=0,
    )  # fmt: skip


def _short(peer: str | None) -> str:
    """Its name without the format, which follows from the class."""
    return peer.split()[0] if peer else "none"


def _coloured(each: Ratio, text: str) -> str:
    colour = "green" if each.is_reached else "red"
    return f"[{colour}]{text}[/{colour}]"


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
    classes = list(dict.fromkeys(rate.precision for rate in rates))
    figure, all_axes = pyplot.subplots(
        len(classes), 1, figsize=(10, 3.2 * len(classes) + 0.6), squeeze=False, layout="constrained"
    )
    colours = ("#4878a8", "#e1a43b", "#7f9f5f", "#a56a9c")
    for precision, axes in zip(classes, all_axes[:, 0], strict=True):
        mine = [rate for rate in rates if rate.precision == precision]
        presets = list(dict.fromkeys(rate.preset for rate in mine))
        servers = sorted(dict.fromkeys((not rate.is_ours, rate.server) for rate in mine))
        labels = {(each.server, each.preset): each.ratio for each in found if each.figure == RATE}
        width = 0.8 / len(servers)
        for index, (is_peer, server) in enumerate(servers):
            bars = [rate for rate in mine if rate.server == server]
            at = [presets.index(bar.preset) + (index - (len(servers) - 1) / 2) * width for bar in bars]
            heights = [bar.median for bar in bars]
            reach = [[bar.median - bar.lowest for bar in bars], [bar.highest - bar.median for bar in bars]]
            drawn = axes.bar(
                at,
                heights,
                width * 0.92,
                yerr=reach,
                capsize=2,
                ecolor="#333333",
                label=server,
                color=colours[index % 4],
            )
            texts = [f"{bar.median:.0f}" for bar in bars]
            if not is_peer:
                known = [labels.get((server, bar.preset)) for bar in bars]
                texts = [
                    text if ratio is None else f"{text}\n×{ratio:.2f}" for text, ratio in zip(texts, known, strict=True)
                ]
            axes.bar_label(drawn, labels=texts, padding=2, fontsize=7)
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
