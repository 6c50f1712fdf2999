"""What one server gives over another, from a kept result."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from bench.ratios import PresetRatios, Ratio, ratios_of, run_ratios
from headrace.errors import ConfigError


def summary(rate: float, per_token_s: float | None = None) -> dict[str, Any]:
    times = {} if per_token_s is None else {"mean": per_token_s, "p50": 9.0}
    return {"output_throughput": rate, "prompt_throughput": 10 * rate, "per_token_s": times}


def entry(
    target: str, preset: str, median: dict[str, Any], *repetitions: dict[str, Any], max_new_tokens: int = 8
) -> dict[str, Any]:
    workload = {"max_new_tokens": max_new_tokens}
    return {
        "target": target, "preset": preset, "workload": workload, "median": median, "repetitions": repetitions
    }  # fmt: skip


def content(*results: dict[str, Any], targets: tuple[str, ...] = ("one", "two"), kind: str = "serving") -> Any:
    machine = {"cpu": "a cpu", "num_cores": 2}
    return {
        "kind": kind, "targets": {name: {} for name in targets}, "results": results,
        "machine": machine, "commit": "0123456789abcdef", "dirty": False,
    }  # fmt: skip


RESULT = content(
    entry("one", "A", summary(100.0, 0.010), summary(90.0, 0.012), summary(100.0, 0.010), summary(110.0, 0.009)),
    entry("two", "A", summary(200.0, 0.004), summary(180.0, 0.004), summary(200.0, 0.004), summary(275.0, 0.003)),
    entry("one", "D", summary(50.0), summary(50.0), max_new_tokens=1),
    entry("two", "D", summary(25.0), summary(25.0), max_new_tokens=1),
    entry("one", "only here", summary(1.0, 1.0), summary(1.0, 1.0)),
)


def test_ratios_are_those_of_the_medians_with_the_reach_of_the_turns():
    assert ratios_of(RESULT) == [
        PresetRatios("A", (100.0, 200.0), Ratio(2.0, 2.0, 2.5), Ratio(2.5, 2.5, 3.0)),
        PresetRatios("D", (500.0, 250.0), Ratio(0.5, 0.5, 0.5), None),
    ]


@pytest.mark.parametrize(
    "bad",
    [content(targets=("one",)), content(targets=("one", "two", "three")), content(kind="fleet"), {}],
    ids=["one server", "three servers", "another kind", "no result"],
)
def test_what_is_no_result_of_two_servers_is_refused(bad):
    with pytest.raises(ConfigError, match="with two --url"):
        ratios_of(bad)


def test_the_table_and_the_plot_name_the_servers(tmp_path):
    results, plot = tmp_path / "results.json", tmp_path / "deep" / "ratios.svg"
    results.write_text(json.dumps(RESULT))
    console = Console(width=120, record=True, file=io.StringIO())

    run_ratios(results, ("off", "auto"), plot, console)

    text = console.export_text()
    assert "2.00 (2.00 to 2.50)" in text
    assert "auto" in text
    assert plot.stat().st_size > 1000
    with pytest.raises(ConfigError, match="plot"):
        run_ratios(results, ("off", "auto"), tmp_path / "plot.nonsense", console)
    with pytest.raises(ConfigError, match="two servers"):
        run_ratios(results, ("off",), None, console)
    results.write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        run_ratios(results, (), None, console)
