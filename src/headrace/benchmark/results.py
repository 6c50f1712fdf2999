"""The results of a benchmark: a JSON document, a table, a plot.

Owns the form of the results. Does not measure. The JSON holds all that is needed to repeat and to judge a figure: command,
commit, machine, target, workload, every repetition, median and spread.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from headrace.benchmark.figures import Limits, Summary, over_repetitions
from headrace.benchmark.machine import revision, this_machine
from headrace.benchmark.tables import print_table
from headrace.benchmark.workloads import PRESETS
from headrace.errors import ConfigError
from headrace.version import VERSION

SCHEMA = 1
_MS = 1000


@dataclass(frozen=True, slots=True)
class Result:
    """All repetitions of one preset against one target. flushed: the prefix cache was emptied before each."""

    target: str
    preset: str
    flushed: bool
    repetitions: list[Summary]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy texts of two servers for the same prompts. common_characters: of the longest common beginning, each."""

    reference: str
    target: str
    num_prompts: int
    num_equal: int
    common_characters: list[int]
    text_characters: list[int]


def header(kind: str, command: str = "headrace") -> dict[str, Any]:
    """How every document begins: what it holds, how it was made, from which code and on which machine. command: with what argv's options came."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "command": [command, *sys.argv[1:]],
        "headrace": VERSION,
        **asdict(revision()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(this_machine()),
    }


def document(
    kind: str,
    targets: dict[str, dict[str, Any]],
    results: Sequence[Result],
    options: dict[str, Any],
    limits: Limits,
    agreements: Sequence[Agreement] = (),
    command: str = "headrace",
) -> dict[str, Any]:
    """The whole of a run as JSON-ready values. kind: serving or offline. targets: name -> what it says of itself."""
    return {
        **header(kind, command),
        "targets": targets,
        "options": options,
        "limits": asdict(limits),
        "agreement": [asdict(agreement) for agreement in agreements],
        "results": [_result_entry(result) for result in results],
    }


def _result_entry(result: Result) -> dict[str, Any]:
    median, spread = over_repetitions(result.repetitions)
    workload = asdict(PRESETS[result.preset])
    answer = workload.pop("answer")
    return {
        "target": result.target,
        "preset": result.preset,
        "workload": {**workload, **answer},
        "flushed": result.flushed,
        "repetitions": [asdict(summary) for summary in result.repetitions],
        "median": median,
        "spread": spread,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the document, indented; makes the folder. Raises ConfigError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the results to {path}: {error.strerror}") from error


def print_results(console: Console, results: Sequence[Result]) -> None:
    """The tables: rates, then one table a latency. A figure is the median over the repetitions.

    Each table fits 80 columns: nothing vanishes in a pipe. The names of several targets stand once, above the tables, by number.
    """
    targets = list(dict.fromkeys(result.target for result in results))
    show_target = len(targets) > 1
    if show_target:
        for number, target in enumerate(targets, 1):
            console.print(f"#{number} = {target}", highlight=False)
    rates = _table("Throughput (per second, median)", show_target)
    for name in (
        "requests",
        "prompt\ntok",
        "output\ntok",
        "total\ntok",
        "±\nspread",
        "goodput",
        "errors",
        "counted\nby",
    ):
        rates.add_column(name, justify="right", no_wrap=True)
    latencies = {
        key: _table(f"{title} (ms, median over repetitions)", show_target)
        for key, title in (
            ("ttft_s", "TTFT"),
            ("itl_s", "Between chunks"),
            ("per_token_s", "Per token"),
            ("e2e_s", "End to end"),
            ("beside_ttft_s", "TTFT of the long prompts beside"),
        )
    }
    for table in latencies.values():
        for name in ("mean", "p50", "p90", "p99"):
            table.add_column(name, justify="right", no_wrap=True, min_width=9)
    for result in results:
        median, spread = over_repetitions(result.repetitions)
        head = [result.preset] + ([f"#{targets.index(result.target) + 1}"] if show_target else [])
        num_errors = sum(summary.num_errors for summary in result.repetitions)
        main_rate = "prompt_throughput" if PRESETS[result.preset].answer.max_new_tokens == 1 else "output_throughput"
        rates.add_row(
            *head,
            *(rate_text(median[f"{what}_throughput"]) for what in ("request", "prompt", "output", "total")),
            f"{spread[main_rate] / 2:.0%}" if len(result.repetitions) > 1 else "-",
            rate_text(median["goodput"]) if "goodput" in median else "-",
            f"[red]{num_errors}[/red]" if num_errors else "0",
            result.repetitions[0].token_source,
        )
        for key, table in latencies.items():
            if key != "beside_ttft_s" or median[key]["count"]:
                table.add_row(*head, *_cells(median[key]))
    for table in (rates, *latencies.values()):
        if table.row_count:
            print_table(console, table)
    errors = sum((Counter(summary.errors) for result in results for summary in result.repetitions), Counter())
    for error, count in sorted(errors.items()):
        console.print(f"[red]{count} x[/red] {error}", markup=True, highlight=False)


def rate_text(value: float) -> str:
    """Four digits are enough to compare by; from 100,000 on in thousands, so that the widest table keeps its 80 columns."""
    if value >= 99_999.5:
        return f"{value / 1000:.0f}k"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def print_agreements(console: Console, agreements: Sequence[Agreement]) -> None:
    for each in agreements:
        colour = "green" if each.num_equal == each.num_prompts else "yellow"
        shares = ", ".join(
            f"{common}/{length}" for common, length in zip(each.common_characters, each.text_characters, strict=True)
        )
        console.print(
            f"[{colour}]greedy agreement of {each.target} with {each.reference}: {each.num_equal} of "
            f"{each.num_prompts} texts equal[/{colour}] (common characters: {shares})",
            highlight=False,
        )


def plot(path: Path, content: dict[str, Any]) -> None:
    """Draw the document's throughput and latencies per preset and target; the format follows the file's ending.

    Needs matplotlib. Raises ConfigError when the ending is none that it knows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = content["results"]
    labels = [entry["preset"] for entry in results]
    if len(content["targets"]) > 1:
        labels = [f"{entry['preset']} · {entry['target']}" for entry in results]
    positions = list(range(len(results)))
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 2.2 + 0.4 * len(results)), sharey=True, layout="constrained"
    )
    keys = ["prompt_throughput" if e["workload"]["max_new_tokens"] == 1 else "output_throughput" for e in results]
    values = [entry["median"][key] for entry, key in zip(results, keys, strict=True)]
    reach = [
        [abs(entry["median"][key] - edge([repetition[key] for repetition in entry["repetitions"]])) for entry, key in zip(results, keys, strict=True)]
        for edge in (min, max)
    ]  # fmt: skip
    bars = left.barh(positions, values, xerr=reach, color="#4878a8", ecolor="#333333", capsize=3)
    left.bar_label(bars, labels=[f" {value:.0f}" for value in values], padding=3)
    left.set_yticks(positions, labels)
    left.set_xlabel("output tokens per second (prefill: prompt tokens)")
    left.ticklabel_format(axis="x", style="plain")
    left.margins(x=0.25)
    for key, name, colour in (("ttft_s", "time to first token", "#c44e52"), ("itl_s", "between chunks", "#55a868")):
        drawn = [(p, e["median"][key]) for p, e in zip(positions, results, strict=True) if "p50" in e["median"][key]]
        for position, figures in drawn:
            right.plot([figures["p50"] * _MS, figures["p99"] * _MS], [position] * 2, color=colour, alpha=0.5, lw=4)
        for percent, marker in (("p50", "o"), ("p90", "|"), ("p99", ">")):
            right.plot(
                [figures[percent] * _MS for _, figures in drawn], [position for position, _ in drawn],
                marker, color=colour, label=f"{name} {percent}",
            )  # fmt: skip
    right.set_xscale("log")
    right.set_xlabel("ms (logarithmic)")
    figure.legend(loc="outside lower center", fontsize="small", ncols=3)
    left.invert_yaxis()
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    commit = (content["commit"] or "no commit")[:10] + ("+" if content["dirty"] else "")
    figure.suptitle(
        f"{content['machine']['cpu']}, {content['machine']['num_cores']} cores · {commit}", fontsize="small"
    )
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib, whose format follows the file's ending, and close it. Raises ConfigError when it cannot be written."""
    from matplotlib import pyplot

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot to {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _table(title: str, show_target: bool) -> Table:
    table = Table(
        title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.add_column("preset", style="bold cyan", no_wrap=True)
    if show_target:
        table.add_column("#", no_wrap=True)
    return table


def _cells(figures: dict[str, float]) -> list[str]:
    """Mean, p50, p90 and p99 in milliseconds; `-` when nothing was measured."""
    if "p50" not in figures:
        return ["-"] * 4
    return [f"{figures[key] * _MS:.1f}" for key in ("mean", "p50", "p90", "p99")]
