"""What a run measured, and the arithmetic from single requests to the figures that are reported.

Owns the record of one request, percentiles, the summary of a repetition and the median and spread over repetitions. Pure:
no clock, no network. Times are seconds.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TokenSource = Literal["usage", "chunks"]
PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it.

    start_s, chunk_s: clock readings of sending and of each chunk that carried text. end_s: of the last byte.
    prompt_tokens, output_tokens: as the server's usage says, or what we sent and the number of chunks (token_source).
    error: why it failed, None when it did not.
    """

    start_s: float
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    token_source: TokenSource = "chunks"
    text: str = ""
    error: str | None = None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_s[0] - self.start_s if self.chunk_s else None

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.chunk_s)]

    @property
    def per_token_s(self) -> float | None:
        """Mean time of an output token after the first; None with fewer than two."""
        if self.output_tokens < 2 or not self.chunk_s:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Limits:
    """The latencies that a request must not exceed to count as good; None = no limit."""

    ttft_s: float | None = None
    per_token_s: float | None = None
    e2e_s: float | None = None

    @property
    def any(self) -> bool:
        return (self.ttft_s, self.per_token_s, self.e2e_s) != (None, None, None)

    def kept_by(self, record: RequestRecord) -> bool:
        """Whether the request succeeded within every limit. A figure that does not exist breaks no limit."""
        pairs = ((record.ttft_s, self.ttft_s), (record.per_token_s, self.per_token_s), (record.e2e_s, self.e2e_s))
        return record.error is None and all(limit is None or value is None or value <= limit for value, limit in pairs)


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of one latency in seconds; all None when nothing was measured."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One repetition of one workload against one server. Rates are per second of `duration_s`, the wall clock. beside_ttft_s: of requests that were
    sent beside the workload."""

    duration_s: float
    num_requests: int
    num_errors: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    request_throughput: float
    prompt_throughput: float
    output_throughput: float
    total_throughput: float
    ttft_s: Distribution
    itl_s: Distribution
    per_token_s: Distribution
    e2e_s: Distribution
    good_requests: int | None
    goodput: float | None
    token_source: str
    errors: dict[str, int]
    beside_ttft_s: Distribution = Distribution(0, None, None, None, None)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile of values in ascending order, linear between neighbours.

    Hyndman and Fan 1996, definition 7 (numpy's default). ordered: at least one value.
    """
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Sequence[float]) -> Distribution:
    if not values:
        return Distribution(0, None, None, None, None)
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Distribution(len(ordered), statistics.fmean(ordered), p50, p90, p99)


def summarise(
    records: Sequence[RequestRecord], duration_s: float, limits: Limits, beside: Sequence[RequestRecord] = ()
) -> Summary:
    """Figures of one repetition. Failed requests count as errors and in nothing else. beside: what was sent beside the workload."""
    done = [record for record in records if record.error is None]
    errors = Counter(record.error for record in (*records, *beside) if record.error is not None)
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    rate = 1 / duration_s if duration_s > 0 else 0.0
    good = sum(limits.kept_by(record) for record in done) if limits.any else None
    return Summary(
        duration_s=duration_s,
        num_requests=len(records),
        num_errors=errors.total(),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=output_tokens,
        request_throughput=len(done) * rate,
        prompt_throughput=prompt_tokens * rate,
        output_throughput=output_tokens * rate,
        total_throughput=(prompt_tokens + output_tokens) * rate,
        ttft_s=distribution([r.ttft_s for r in done if r.ttft_s is not None]),
        itl_s=distribution([gap for r in done for gap in r.gaps_s]),
        per_token_s=distribution([r.per_token_s for r in done if r.per_token_s is not None]),
        e2e_s=distribution([r.e2e_s for r in done]),
        good_requests=good,
        goodput=None if good is None else good * rate,
        token_source="+".join(sorted({record.token_source for record in done})) or "none",
        errors=dict(errors),
        beside_ttft_s=distribution([r.ttft_s for r in beside if r.error is None and r.ttft_s is not None]),
    )


def over_repetitions(summaries: "Sequence[DataclassInstance]") -> tuple[dict[str, Any], dict[str, Any]]:
    """Median and relative spread, (largest - smallest) / median, of every number of the summaries, nested as they are.

    summaries: dataclasses of one kind. A number that is missing from some repetition is left out of both.
    """
    return _merge([asdict(summary) for summary in summaries])


def _merge(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    median: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    for key, first in rows[0].items():
        if key == "errors":
            continue
        values = [row[key] for row in rows]
        if isinstance(first, dict):
            median[key], spread[key] = _merge(values)
        elif all(isinstance(value, int | float) for value in values):
            median[key] = statistics.median(values)
            spread[key] = (max(values) - min(values)) / median[key] if median[key] else 0.0
    return median, spread


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one thing over its repetitions. On a shared machine compare `best_s` and `median_s` of one run only."""

    repetitions: int
    best_s: float
    median_s: float
    p90_s: float


def timing(seconds: Sequence[float]) -> Timing:
    ordered = sorted(seconds)
    return Timing(len(ordered), ordered[0], statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))])
