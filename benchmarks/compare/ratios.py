"""From measured rates to ratios: ours over the best peer, for each class of precision and preset; their table and their plot.

Owns this arithmetic and how it is shown. Measures nothing. Pure but for the plot's file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from headrace.benchmark.workloads import PRESETS
from headrace.errors import ConfigError

TARGETS: dict[str, dict[str, float]] = {
    "bf16": {"A": 1.3, "B1": 1.6, "B8": 1.6, "B32": 1.4, "C": 1.8, "Ccold": 2.0, "D": 1.25},
    "int16": {"A": 1.3, "B1": 1.6, "B8": 1.6, "B32": 1.4, "C": 1.8, "Ccold": 2.0, "D": 1.25},
    "int8": {"A": 1.7, "B1": 1.9, "B8": 1.8, "B32": 1.8, "C": 2.0, "Ccold": 2.0, "D": 1.6},
    "int8-fast": {"A": 1.7, "B1": 1.9, "B8": 1.8, "B32": 1.8, "C": 2.0, "Ccold": 2.0, "D": 2.2},
    "int4": {"A": 2.0, "B1": 2.5, "B8": 2.0, "B32": 2.0, "C": 2.0, "Ccold": 2.0, "D": 2.2},
}
"""What we mean to reach, ours over the best peer, by our precision and preset."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What one server reached: tokens per second, median over the repetitions, lowest and highest.

    precision: its class, "16", "8" or "4". Output tokens, but prompt tokens where a preset generates one token only.
    errors: requests that failed; then the rate is not comparable.
    """

    precision: str
    preset: str
    server: str
    is_ours: bool
    median: float
    lowest: float
    highest: float
    errors: int = 0


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over the best peer in one class and preset. peer is None when no peer finished without errors; so is ratio,
    also when ours had errors."""

    precision: str
    preset: str
    server: str
    ours: float
    peer: str | None
    peer_rate: float | None
    ratio: float | None
    target: float

    @property
    def is_reached(self) -> bool:
        """Whether the ratio is at least the target; an unknown ratio is not."""
        return self.ratio is not None and self.ratio >= self.target


def rate_key(preset: str) -> str:
    """Which rate of a summary counts for a preset."""
    return "prompt_throughput" if PRESETS[preset].max_new_tokens == 1 else "output_throughput"


def ratios(rates: Sequence[Rate]) -> list[Ratio]:
    """One for each rate of ours, in the order of `rates`. A peer with errors is no rival.

    The last word of our server's name says its precision, see `TARGETS`.
    """
    found = []
    for ours in rates:
        if not ours.is_ours:
            continue
        rivals = [r for r in rates if (r.precision, r.preset) == (ours.precision, ours.preset) and not r.is_ours]
        best = max((r for r in rivals if r.errors == 0 and r.median > 0), key=lambda r: r.median, default=None)
        found.append(
            Ratio(
                precision=ours.precision,
                preset=ours.preset,
                server=ours.server,
                ours=ours.median,
                peer=best.server if best else None,
                peer_rate=best.median if best else None,
                ratio=ours.median / best.median if best and ours.errors == 0 else None,
                target=TARGETS[ours.server.split()[-1]][ours.preset],
            )
        )
    return found


def ratio_table(found: Iterable[Ratio]) -> Table:
    """One row a class and preset; 72 columns wide at most."""
    table = Table(title="Headrace against the best peer (tok/s)", title_justify="left", header_style="bold")
    for name in ("ours is", "preset"):
        table.add_column(name, style="bold cyan")
    for name in ("ours", "peer"):
        table.add_column(name, justify="right")
    table.add_column("best peer", no_wrap=True)
    for name in ("ratio", "target"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for each in found:
        if last not in (None, each.server):
            table.add_section()
        colour = "green" if each.is_reached else "red"
        table.add_row(
            each.server.split()[-1] if each.server != last else "",
            each.preset,
            f"{each.ours:.0f}",
            "-" if each.peer_rate is None else f"{each.peer_rate:.0f}",
            each.peer or "none without errors",
            f"[{colour}]{'-' if each.ratio is None else f'{each.ratio:.2f}'}[/{colour}]",
            f"{each.target:.2f}",
        )
        last = each.server
    return table


def draw(path: Path, rates: Sequence[Rate], found: Sequence[Ratio], note: str) -> None:
    """Bars of every server by preset, one picture a class; above our bar its ratio. The format follows the file's ending.

    note: the machine and commit, under the title. Raises ConfigError when it cannot be drawn or written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'headrace[bench]'") from error
    matplotlib.use("Agg")
    # Text as text: the file stays small and can be searched.
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    classes = list(dict.fromkeys(rate.precision for rate in rates))
    figure, all_axes = pyplot.subplots(
        len(classes), 1, figsize=(10, 3.2 * len(classes) + 0.6), squeeze=False, layout="constrained"
    )
    colours = ("#4878a8", "#e1a43b", "#7f9f5f", "#a56a9c")
    for precision, axes in zip(classes, all_axes[:, 0], strict=True):
        mine = [rate for rate in rates if rate.precision == precision]
        presets = list(dict.fromkeys(rate.preset for rate in mine))
        servers = sorted(dict.fromkeys((not rate.is_ours, rate.server) for rate in mine))
        labels = {(each.server, each.preset): each.ratio for each in found}
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot to {path}: {error}") from error
    finally:
        pyplot.close(figure)
