"""What the second server of a result of `headrace bench serving` gives over the first, preset by preset; a table and a plot. Measures nothing."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.program import parser_of, refusals, words
from headrace.benchmark.results import rate_text, save_figure
from headrace.benchmark.tables import print_table
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of the medians; low, high: of the repetitions, each with the other server's of the same turn."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PresetRatios:
    """rates: tokens per second of both servers (medians), of the prompt if one token is asked for. rate: the second over the first.

    per_token: time per token after the first, the first server over the second, so that more is faster, too; None if there are no such tokens.
    """

    preset: str
    rates: tuple[float, float]
    rate: Ratio
    per_token: Ratio | None


def ratios_of(content: dict[str, Any]) -> list[PresetRatios]:
    """For each preset of the document. Raises ConfigError unless two servers were measured."""
    targets = list(content.get("targets", ()))
    if content.get("kind") != "serving" or len(targets) != 2:
        raise ConfigError(f"ratios need a result of `headrace bench serving` with two --url, got {len(targets)}")
    of_target = [{e["preset"]: e for e in content["results"] if e["target"] == target} for target in targets]
    return [
        _preset_ratios(preset, first, of_target[1][preset])
        for preset, first in of_target[0].items()
        if preset in of_target[1]
    ]


def run_ratios(results: Path, names: Sequence[str], plot: Path | None, console: Console) -> None:
    """Print the table, and draw the plot. names: of the two servers; empty: their addresses. Raises ConfigError."""
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")
    try:
        content = json.loads(results.read_text())
        found = ratios_of(content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {results}: {error}") from error
    names = names or list(content["targets"])
    if len(names) != 2:
        raise ConfigError(f"--names takes the names of two servers, got {len(names)}")
    _print(console, found, names)
    if plot is not None:
        draw(plot, content, found, names)
        console.print(f"plot written to {plot}", highlight=False)


def draw(path: Path, content: dict[str, Any], found: Sequence[PresetRatios], names: Sequence[str]) -> None:
    """Bars of both ratios per preset, with what the repetitions spread; the format follows the file's ending. Needs matplotlib.

    Raises ConfigError when the ending is none that it knows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first, second = names
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.55 * len(found)), layout="constrained")
    kinds: tuple[tuple[str, str, list[Ratio | None]], ...] = (
        ("tokens per second", "#4878a8", [each.rate for each in found]),
        ("speed after the first token", "#55a868", [each.per_token for each in found]),
    )
    for place, (label, colour, ratios) in enumerate(kinds):
        drawn = [(index + 0.38 * place, ratio) for index, ratio in enumerate(ratios) if ratio is not None]
        values = [ratio.value for _, ratio in drawn]
        # The ratio of medians can lie beside those of the repetitions.
        reach = [
            [max(0.0, ratio.value - ratio.low) for _, ratio in drawn],
            [max(0.0, ratio.high - ratio.value) for _, ratio in drawn],
        ]
        at = [position for position, _ in drawn]
        bars = axes.barh(at, values, 0.36, xerr=reach, color=colour, ecolor="#333333", capsize=2, label=label)
        axes.bar_label(bars, labels=[f" {value:.2f}" for value in values], padding=3, fontsize="small")
    axes.axvline(1.0, color="#333333", lw=1)
    axes.set_yticks([index + 0.19 for index in range(len(found))], [each.preset for each in found])
    axes.invert_yaxis()
    axes.set_xlabel(f"{second} over {first}")
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small", ncols=2)
    commit = (content["commit"] or "no commit")[:10] + ("+" if content["dirty"] else "")
    machine = content["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['num_cores']} cores · {commit}", fontsize="small")
    save_figure(figure, path)


def _preset_ratios(preset: str, first: dict[str, Any], second: dict[str, Any]) -> PresetRatios:
    key = "prompt_throughput" if first["workload"]["max_new_tokens"] == 1 else "output_throughput"

    def per_token(summary: dict[str, Any]) -> float | None:
        mean: float | None = summary["per_token_s"].get("mean")
        return mean

    rates = first["median"][key], second["median"][key]
    turns = [(ours[key], theirs[key]) for theirs, ours in _turns(first, second)]
    rate = _ratio((rates[1], rates[0]), turns)
    if rate is None:
        raise ConfigError(f"preset {preset}: a server gave no tokens")
    times = per_token(first["median"]), per_token(second["median"])
    slow = [(per_token(theirs), per_token(ours)) for theirs, ours in _turns(first, second)]
    return PresetRatios(preset, rates, rate, _ratio(times, slow))


def _turns(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Repetitions of both that ran one after the other."""
    return list(zip(first["repetitions"], second["repetitions"], strict=False))


def _ratio(
    medians: tuple[float | None, float | None], turns: Sequence[tuple[float | None, float | None]]
) -> Ratio | None:
    """The first of each pair over the second; None if one is missing or zero."""
    found = [above / below for above, below in (medians, *turns) if above and below]
    if len(found) != len(turns) + 1:
        return None
    return Ratio(found[0], min(found[1:], default=found[0]), max(found[1:], default=found[0]))


def _print(console: Console, found: Sequence[PresetRatios], names: Sequence[str]) -> None:
    first, second = names
    table = Table(
        title="tokens per second (prefill: of the prompt), medians; in brackets: lowest and highest of the repetitions",
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("preset", style="bold cyan", no_wrap=True)
    for header in (first, second, "ratio", "after the first token"):
        table.add_column(header, justify="right")
    for each in found:
        rates = map(rate_text, each.rates)
        table.add_row(each.preset, *rates, _ratio_text(each.rate), _ratio_text(each.per_token))
    print_table(console, table)


def _ratio_text(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def main() -> None:
    """See the module docstring."""
    parser = parser_of(__doc__, output=False)
    parser.add_argument(
        "results", type=Path, help="what `headrace bench serving` with two --url has written (--output)"
    )
    parser.add_argument(
        "--names", type=words, default="", help="what to call the two servers; default: their addresses"
    )
    parser.add_argument("--plot", type=Path, help="plot to write, .svg or .png")
    options = parser.parse_args()
    with refusals():
        run_ratios(options.results, options.names, options.plot, Console())


if __name__ == "__main__":
    main()
