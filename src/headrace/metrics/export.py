"""Metrics in Prometheus' text format, under our names and others: those of other servers, so that their dashboards work, or with `_` instead of `:`.

Owns the two tables of names. Values, buckets and labels are ours; metrics that we do not measure are missing. The names are those of vLLM's
documentation ("Production Metrics") and of SGLang's. Called in the event loop of the main process; cheap enough for it.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headrace.metrics.catalog import Metrics

CONTENT_TYPE = CONTENT_TYPE_LATEST

Dialect = Literal["vllm", "sglang"]
"""Other servers."""

Names = Literal["none", "vllm", "sglang", "underscore"]
"""Values of --metrics-compat. none: our names; a server: its names as well; underscore: ours with `_` instead of `:`."""

NAMES: dict[Dialect, tuple[tuple[str, str], ...]] = {
    "vllm": (
        ("num_running_reqs", "num_requests_running"),
        ("num_queue_reqs", "num_requests_waiting"),
        ("token_usage", "kv_cache_usage_perc"),
        ("token_usage", "gpu_cache_usage_perc"),
        ("retracted_requests", "num_preemptions"),
        ("prefix_query_tokens", "prefix_cache_queries"),
        ("cached_tokens", "prefix_cache_hits"),
        ("prompt_tokens", "prompt_tokens"),
        ("generation_tokens", "generation_tokens"),
        ("requests", "request_success"),
        ("time_to_first_token_seconds", "time_to_first_token_seconds"),
        ("inter_token_latency_seconds", "inter_token_latency_seconds"),
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        ("e2e_request_latency_seconds", "e2e_request_latency_seconds"),
        ("queue_time_seconds", "request_queue_time_seconds"),
        ("request_prompt_tokens", "request_prompt_tokens"),
        ("request_generation_tokens", "request_generation_tokens"),
        ("cache_config_info", "cache_config_info"),
        ("lora_requests_info", "lora_requests_info"),
    ),
    "sglang": (
        ("num_running_reqs", "num_running_reqs"),
        ("num_queue_reqs", "num_queue_reqs"),
        ("token_usage", "token_usage"),
        ("gen_throughput", "gen_throughput"),
        ("cache_hit_rate", "cache_hit_rate"),
        ("prompt_tokens", "prompt_tokens"),
        ("generation_tokens", "generation_tokens"),
        ("cached_tokens", "cached_tokens"),
        ("requests", "num_requests"),
        ("aborted_requests", "num_aborted_requests"),
        ("time_to_first_token_seconds", "time_to_first_token_seconds"),
        ("inter_token_latency_seconds", "inter_token_latency_seconds"),
        ("e2e_request_latency_seconds", "e2e_request_latency_seconds"),
        ("queue_time_seconds", "queue_time_seconds"),
    ),
}
"""Pairs of (our name, theirs), both without prefix and without a counter's `_total`."""

_OUR_PREFIX = "headrace:"
_PLAIN_PREFIX = "headrace_"
_LABELS = {"vllm": {"finish_reason": "finished_reason", "dp_rank": "engine"}, "sglang": {}}


def render(metrics: Metrics, names: Names = "none") -> bytes:
    """The exposition text of every metric. names: see `Names`."""
    if names == "underscore":
        return generate_latest(_Given(_underscored(metrics.registry.collect())))
    ours = generate_latest(metrics.registry)
    return ours if names == "none" else ours + generate_latest(_Given(_renamed(metrics.registry.collect(), names)))


class _Given(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _renamed(metrics: Iterable[Metric], dialect: Dialect) -> Iterator[Metric]:
    """Those that `dialect` has a name for, under that name."""
    ours = {metric.name.removeprefix(_OUR_PREFIX): metric for metric in metrics}
    labels = _LABELS[dialect]
    for our_name, their_name in NAMES[dialect]:
        metric = ours[our_name]
        renamed = Metric(f"{dialect}:{their_name}", metric.documentation, metric.type)
        for sample in metric.samples:
            name = renamed.name + sample.name.removeprefix(metric.name)
            renamed.add_sample(
                name, {labels.get(key, key): value for key, value in sample.labels.items()}, sample.value
            )
        yield renamed


def _underscored(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """With names that begin with `headrace_`: Prometheus keeps colons for the names of recording rules."""
    for metric in metrics:
        renamed = Metric(metric.name.replace(_OUR_PREFIX, _PLAIN_PREFIX, 1), metric.documentation, metric.type)
        for sample in metric.samples:
            renamed.add_sample(sample.name.replace(_OUR_PREFIX, _PLAIN_PREFIX, 1), sample.labels, sample.value)
        yield renamed
