"""`python -m bench.fleet`: every fleet with every policy, the tables, the JSON and the plot."""

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.fleet.options import FleetOptions
from bench.fleet.outcome import Outcome
from bench.fleet.plot import plot
from bench.fleet.simulation import Fleet
from bench.program import report_of, table_of
from headrace.benchmark.figures import over_repetitions
from headrace.benchmark.results import rate_text, write_json
from headrace.benchmark.tables import print_table, progress_columns
from headrace.frontend.balancers import Method

_UPDATE_EVERY = 256
"""Requests between two updates of the bar."""
_MS = 1000


def run_fleet(options: FleetOptions, console: Console) -> dict[str, Any]:
    """Simulate, print, write; the results document. The fleets of one repetition get the same requests with every policy."""
    runs: dict[tuple[int, Method], list[Outcome]] = {case: [] for case in product(options.replicas, options.policies)}
    num_requests = sum(options.requests_of(count) for count in options.replicas) * len(options.policies)
    with _progress(console, num_requests * options.repeat) as start:
        for repetition, ((count, policy), outcomes) in product(range(options.repeat), runs.items()):
            name = f"{count} replicas, {policy}"
            on_done = start(f"[{repetition + 1}/{options.repeat}] {name}")
            # Millions of live objects would be walked again and again. What is in cycles, such as trees of caches, goes at the end.
            gc.disable()
            try:
                outcomes.append(Fleet(options, count, policy, options.seed + repetition, on_done).run())
            finally:
                gc.enable()
            gc.collect()
            console.print(f"[dim]{name}: {_in_one_line(outcomes[-1])}[/dim]", highlight=False)
    described = {name: value for name, value in asdict(options).items() if name not in ("output", "plot")}
    results = []
    for (count, policy), outcomes in runs.items():
        median, spread = over_repetitions(outcomes)
        repetitions = [asdict(outcome) for outcome in outcomes]
        figures = {"repetitions": repetitions, "median": median, "spread": spread}
        results.append({"replicas": count, "policy": policy, **figures})
    found = {"options": described, "peak_memory_bytes": _peak_memory_bytes(), "results": results}
    content = report_of("fleet", found)
    _print_results(console, options, results)
    if options.output is not None:
        write_json(options.output, content)
        console.print(f"results written to {options.output}", highlight=False)
    if options.plot is not None:
        plot(options.plot, content)
        console.print(f"plot written to {options.plot}", highlight=False)
    return content


def _print_results(console: Console, options: FleetOptions, results: list[dict[str, Any]]) -> None:
    """One table a fleet: a row for each policy, medians over the repetitions."""
    numbers = ("hit\nrate", "TTFT\np50", "TTFT\np99", "e2e\np99", "busiest\n/ mean", "used", "output\ntok/s")
    for count in options.replicas:
        asked = f"{options.requests_of(count)} requests, {options.rate:g} a second and replica"
        table = table_of(f"{count} replicas, {asked} (simulated; ms)", ("policy",), numbers)
        for result in results:
            if result["replicas"] == count:
                median = result["median"]
                times = median["ttft_s"]["p50"], median["ttft_s"]["p99"], median["e2e_s"]["p99"]
                table.add_row(
                    result["policy"],
                    f"{median['hit_rate']:.3f}",
                    *(f"{seconds * _MS:.0f}" for seconds in times),
                    f"{median['busiest']:.2f}",
                    f"{median['num_used']:.0f}",
                    rate_text(median["output_throughput"]),
                )
        print_table(console, table)


def _in_one_line(outcome: Outcome) -> str:
    """Shown while a long run goes on."""
    moved = f", {outcome.num_deaths} deaths, {outcome.num_moved} requests moved" if outcome.num_deaths else ""
    return f"hit rate {outcome.hit_rate:.3f}{moved}; {outcome.num_steps} steps simulated in {outcome.wall_s:.1f} s"


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
