"""The plot of `python -m bench.fleet`: hit rate, time to first token and imbalance over the size of the fleet."""

from pathlib import Path
from typing import Any

from headrace.benchmark.results import save_figure

_COLOURS = {"round_robin": "#8c8c8c", "shortest_queue": "#4878a8", "total_tokens": "#55a868", "cache_aware": "#c44e52"}
_MS = 1000


def plot(path: Path, content: dict[str, Any]) -> None:
    """Draw the document; the format follows the file's ending. Needs matplotlib. Raises ConfigError for an ending that it does not know."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    figure, (hits, first, busiest) = pyplot.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    sizes = sorted({entry["replicas"] for entry in content["results"]})
    for policy in dict.fromkeys(entry["policy"] for entry in content["results"]):
        medians = {entry["replicas"]: entry["median"] for entry in content["results"] if entry["policy"] == policy}
        colour = _COLOURS[policy]
        hits.plot(sizes, [medians[size]["hit_rate"] for size in sizes], "o-", color=colour, label=policy)
        for percent, style in (("p50", "o-"), ("p99", "^--")):
            first.plot(sizes, [medians[size]["ttft_s"][percent] * _MS for size in sizes], style, color=colour)
        busiest.plot(sizes, [medians[size]["busiest"] for size in sizes], "o-", color=colour)
    for axes, title in (
        (hits, "prompt tokens found in the cache"),
        (first, "time to first token, ms (line: p50, dashed: p99)"),
        (busiest, "busy time of the busiest replica / mean"),
    ):
        axes.set_title(title, fontsize="small")
        axes.set_xlabel("replicas")
        axes.set_xscale("log")
        axes.set_xticks(sizes)
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.grid(alpha=0.3)
    hits.set_ylim(0, 1)
    first.set_ylim(bottom=0)
    busiest.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", fontsize="small", ncols=len(_COLOURS))
    commit = (content["commit"] or "no commit")[:10] + ("+" if content["dirty"] else "")
    asked = f"{content['options']['rate']:g} requests a second and replica"
    figure.suptitle(f"simulated, {asked} · {commit}", fontsize="small")
    save_figure(figure, path)
