"""The figures of `headrace top`: rates, shares and percentiles from readings of a server's metrics.

Pure arithmetic: no clock, no network, no terminal. The web dashboard does the same in `server/ui/static/metrics.js`.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
"""Metrics by their names: labels and value of each series."""

NOTHING: Samples = {}
"""The metrics of a server that has just started, for counters: all are zero."""

WINDOW_S = 15.0
"""Latencies and the hit rate are those of this period."""

RATE_S = 5.0
"""The rate of prompt tokens is that of this period: a prompt counts at once."""

MAX_RATES = 240
"""Most rates to keep for the plot."""

MEDIAN, HIGH = 0.5, 0.95
"""The percentiles that are shown, as shares."""


def parse_metrics(text: str) -> Samples:
    """The metrics in a text of Prometheus' format; Headrace's own without their prefix. Raises ValueError for any other text."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("headrace:").removeprefix("headrace_")
            found.setdefault(name, []).append((sample.labels, sample.value))
    return found


def total(samples: Samples, name: str) -> float | None:
    """The sum over all series; None if there is no such metric."""
    series = samples.get(name)
    return None if series is None else sum(value for _, value in series)


def mean(samples: Samples, name: str) -> float | None:
    """The mean of all series; None if there is no such metric."""
    series = samples.get(name)
    return sum(value for _, value in series) / len(series) if series else None


def label(samples: Samples, name: str, key: str) -> str:
    """A label of the metric's first series; empty if there is none."""
    series = samples.get(name)
    return series[0][0].get(key, "") if series else ""


def growth(before: Samples, now: Samples, name: str) -> float:
    """How much a counter has grown; if the server was restarted in between, its value now. 0.0 if there is no such metric."""
    first, last = total(before, name) or 0.0, total(now, name) or 0.0
    return last - first if last >= first else last


def percentiles(before: Samples, now: Samples, name: str, shares: Sequence[float]) -> tuple[float, ...] | None:
    """Percentiles of what a histogram counted between two readings, linear within a bucket. None if it counted nothing.

    shares: 0 to 1 each. What lies beyond the last bound counts as that bound.
    """
    old, new = _cumulative(before, name), _cumulative(now, name)
    if any(count < old.get(bound, 0.0) for bound, count in new.items()):
        old = {}  # the server was restarted
    counts = sorted((bound, count - old.get(bound, 0.0)) for bound, count in new.items())
    if not counts or counts[-1][1] <= 0:
        return None
    return tuple(_percentile(counts, share * counts[-1][1]) for share in shares)


def _cumulative(samples: Samples, name: str) -> dict[float, float]:
    """Upper bound of each bucket -> number of values up to there."""
    counts: dict[float, float] = {}
    for labels, value in samples.get(f"{name}_bucket", ()):
        bound = float(labels["le"])
        counts[bound] = counts.get(bound, 0.0) + value
    return counts


def _percentile(counts: Sequence[tuple[float, float]], rank: float) -> float:
    """The value with this rank. counts: bounds, ascending, each with the number of values up to there."""
    low, num_below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - num_below) / (count - num_below)
        low, num_below = bound, count
    return low


class Load(msgspec.Struct, frozen=True):
    """A replica's load as `/v1/loads` gives it."""

    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_grammar_queue_reqs: int = 0
    num_used_tokens: int = 0
    max_total_tokens: int = 0
    cache_hit_rate: float = 0.0
    gen_throughput: float = 0.0

    @property
    def num_waiting(self) -> int:
        """Those whose grammar is being compiled wait, too."""
        return self.num_waiting_reqs + self.num_grammar_queue_reqs

    @property
    def kv_share(self) -> float:
        """Share of the KV cache that is in use, 0 to 1."""
        return self.num_used_tokens / self.max_total_tokens if self.max_total_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the server does; None = not known. Rates are tokens per second, shares 0 to 1, latencies (median, 95th percentile) in seconds.

    output_rate: as the schedulers measure it. (The counter of the main process jumps: replies that are not streamed reach it in large pieces.)
    prompt_rate counts the tokens of a prompt when its first output token has come.
    """

    output_rate: float | None = None
    prompt_rate: float | None = None
    num_running: float | None = None
    num_waiting: float | None = None
    kv_share: float | None = None
    hit_rate: float | None = None
    ttft_s: tuple[float, ...] | None = None
    itl_s: tuple[float, ...] | None = None


class Readings:
    """The readings of the last WINDOW_S seconds, and the output rates of some time before. rates: the latest last."""

    def __init__(self) -> None:
        self.rates: deque[float] = deque(maxlen=MAX_RATES)
        self._readings: deque[tuple[float, Samples]] = deque()

    def add(self, at_s: float, samples: Samples) -> None:
        """Add a reading. at_s: when it was made, by any clock that only goes forward."""
        readings = self._readings
        readings.append((at_s, samples))
        # The first one kept is the last one from before the window, so that the window is covered.
        while len(readings) > 2 and readings[1][0] <= at_s - WINDOW_S:
            readings.popleft()
        self.add_rate(total(samples, "gen_throughput") or 0.0)

    def add_rate(self, rate: float) -> None:
        """Add an output rate, for the plot."""
        self.rates.append(rate)

    def interrupt(self) -> None:
        """The server has gone: what it says next is not compared with what it said before."""
        self._readings.clear()

    def figures(self, *, of_all_time: bool = False) -> Figures:
        """The figures as of the last reading. of_all_time: latencies and the hit rate since the server's start, not those of the window."""
        if not self._readings:
            return Figures()
        old, now = NOTHING if of_all_time else self._readings[0][1], self._readings[-1][1]
        num_queued = total(now, "num_queue_reqs")
        num_asked = growth(old, now, "prefix_query_tokens_total")
        return Figures(
            output_rate=total(now, "gen_throughput"),
            prompt_rate=self._prompt_rate(),
            num_running=total(now, "num_running_reqs"),
            num_waiting=None if num_queued is None else num_queued + (total(now, "num_grammar_queue_reqs") or 0.0),
            kv_share=mean(now, "token_usage"),
            # The two are counted by different processes, one a moment after the other.
            hit_rate=min(1.0, growth(old, now, "cached_tokens_total") / num_asked) if num_asked else None,
            ttft_s=percentiles(old, now, "time_to_first_token_seconds", (MEDIAN, HIGH)),
            itl_s=percentiles(old, now, "inter_token_latency_seconds", (MEDIAN, HIGH)),
        )

    def _prompt_rate(self) -> float | None:
        """Since the last reading that is RATE_S seconds old, or since the first one. None for a single reading."""
        now_s, now = self._readings[-1]
        early = [reading for reading in self._readings if now_s - reading[0] >= RATE_S]
        before_s, before = early[-1] if early else self._readings[0]
        return growth(before, now, "prompt_tokens_total") / (now_s - before_s) if now_s > before_s else None


def figures_of_loads(loads: Sequence[Load]) -> Figures:
    """What is known of a server without metrics. Its hit rate is that since its start."""
    return Figures(
        output_rate=sum(load.gen_throughput for load in loads),
        num_running=sum(load.num_running_reqs for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        kv_share=sum(load.num_used_tokens for load in loads) / (sum(load.max_total_tokens for load in loads) or 1),
        hit_rate=sum(load.cache_hit_rate for load in loads) / (len(loads) or 1),
    )
