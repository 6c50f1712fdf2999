"""Short things timed often: statistics of repetitions, and the document that holds them.

Owns the form of the results of `bench step` and `bench kernels`; `results.py` owns that of the client-side benchmarks. Does not
measure.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from headrace.benchmark.machine import revision, this_machine
from headrace.benchmark.results import SCHEMA
from headrace.version import VERSION


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one thing over its repetitions. On a shared machine compare `best_s` and `median_s` of one run only."""

    repetitions: int
    best_s: float
    median_s: float
    p90_s: float


def timing(seconds: Sequence[float]) -> Timing:
    """Statistics of at least one repetition."""
    ordered = sorted(seconds)
    return Timing(len(ordered), ordered[0], statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))])


def timing_document(kind: str, subject: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole of a run as JSON-ready values. kind: step or kernels. subject: what was measured, with which options."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "command": ["headrace", *sys.argv[1:]],
        "headrace": VERSION,
        **asdict(revision()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(this_machine()),
        **subject,
        "results": list(results),
    }
