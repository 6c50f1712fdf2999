"""`python -m bench.fleet`: every fleet with every policy, the tables, the JSON and the plot."""

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.fleet.options import FleetOptions
from bench.fleet.outcome import Outcome
from bench.fleet.plot import plot
from bench.fleet.simulation import Fleet
from bench.program import report_of
from headrace.benchmark.figures import over_repetitions
from headrace.benchmark.results import rate_text, write_json
from headrace.benchmark.tables import print_table, progress_columns
from headrace.frontend.balancers import Method

_UPDATE_EVERY = 256
"""Requests between two updates of the bar."""
_MS = 1000


@dataclass(frozen=True, slots=True)
class FleetResult:
    """All repetitions of one fleet with one policy."""

    replicas: int
    policy: Method
    repetitions: list[Outcome]


def run_fleet(options: FleetOptions, console: Console) -> dict[str, Any]:
    """Simulate, print, write; the results document. The fleets of one repetition get the same requests with every policy."""
    results = {
        (count, policy): FleetResult(count, policy, []) for count in options.replicas for policy in options.policies
    }
    num_requests = sum(options.requests_of(count) for count in options.replicas) * len(options.policies)
    with _progress(console, num_requests * options.repeat) as start:
        for repetition in range(options.repeat):
            for (count, policy), result in results.items():
                on_done = start(f"[{repetition + 1}/{options.repeat}] {count} replicas, {policy}")
                outcome = Fleet(options, count, policy, options.seed + repetition, on_done).run()
                result.repetitions.append(outcome)
                gc.collect()  # the trees of caches are cycles
                console.print(f"[dim]{_in_one_line(result, outcome)}[/dim]", highlight=False)
    content = _document(options, list(results.values()))
    _print_results(console, options, list(results.values()))
    if options.output is not None:
        write_json(options.output, content)
        console.print(f"results written to {options.output}", highlight=False)
    if options.plot is not None:
        plot(options.plot, content)
        console.print(f"plot written to {options.plot}", highlight=False)
    return content


def _document(options: FleetOptions, results: list[FleetResult]) -> dict[str, Any]:
    """The whole of a run as JSON-ready values."""
    described = asdict(options)
    for name in ("output", "plot"):
        del described[name]
    entries = []
    for result in results:
        median, spread = over_repetitions(result.repetitions)
        entries.append(
            {
                "replicas": result.replicas,
                "policy": result.policy,
                "repetitions": [asdict(outcome) for outcome in result.repetitions],
                "median": median,
                "spread": spread,
            }
        )
    return report_of("fleet", {"options": described, "peak_memory_bytes": _peak_memory_bytes(), "results": entries})


def _print_results(console: Console, options: FleetOptions, results: list[FleetResult]) -> None:
    """One table a fleet: a row for each policy, medians over the repetitions."""
    for count in options.replicas:
        requests = options.requests_of(count)
        table = Table(
            title=f"{count} replicas, {requests} requests, {options.rate:g} a second and replica (simulated; ms)",
            title_justify="left",
            header_style="bold",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        table.add_column("policy", style="bold cyan", no_wrap=True)
        for name in ("hit\nrate", "TTFT\np50", "TTFT\np99", "e2e\np99", "busiest\n/ mean", "used", "output\ntok/s"):
            table.add_column(name, justify="right", no_wrap=True)
        for result in results:
            if result.replicas != count:
                continue
            median, _ = over_repetitions(result.repetitions)
            table.add_row(
                result.policy,
                f"{median['hit_rate']:.3f}",
                f"{median['ttft_s']['p50'] * _MS:.0f}",
                f"{median['ttft_s']['p99'] * _MS:.0f}",
                f"{median['e2e_s']['p99'] * _MS:.0f}",
                f"{median['busiest']:.2f}",
                f"{median['num_used']:.0f}",
                rate_text(median["output_throughput"]),
            )
        print_table(console, table)


def _in_one_line(result: FleetResult, outcome: Outcome) -> str:
    """Shown while a long run goes on."""
    moved = f", {outcome.num_deaths} deaths, {outcome.num_moved} requests moved" if outcome.num_deaths else ""
    return (
        f"{result.replicas} replicas, {result.policy}: hit rate {outcome.hit_rate:.3f}{moved}; "
        f"{outcome.num_steps} steps simulated in {outcome.wall_s:.1f} s"
    )


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _progress(console: Console, num_requests: int) -> Iterator[Callable[[str], Callable[[], None]]]:
    """Gives the function that starts the next run on the bar, which returns what to call after each answer."""
    columns = progress_columns("{task.completed:.0f}/{task.total:.0f}")
    with Progress(*columns, console=console, transient=True, speed_estimate_period=600) as progress:
        task = progress.add_task("", total=num_requests)
        num_done = 0

        def on_done() -> None:
            nonlocal num_done
            num_done += 1
            if num_done % _UPDATE_EVERY == 0:
                progress.update(task, completed=num_done)

        def start(title: str) -> Callable[[], None]:
            progress.update(task, description=title)
            return on_done

        yield start
