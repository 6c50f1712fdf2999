"""Metrics in which every name has a value, and what is exported of them."""

from prometheus_client.parser import text_string_to_metric_families

from headrace.messages.control import InternalState, PoolState
from headrace.messages.media import MediaStats
from headrace.metrics.catalog import Metrics
from headrace.metrics.export import render

STATE = InternalState(
    PoolState(1000, 400, 350, 250, 8, 6, True), 2, 3, 0, 9, 4, 0, 5, 50, 60, 10, 40, 40, 0, 0, 12.5, 0.5, 7
)


def busy_metrics():
    metrics = Metrics("tiny")
    metrics.set_scheduler_state(STATE)
    metrics.set_cache_config(16, 62, 1)
    metrics.lora_requests.watch(8, lambda: ({"b", "a"}, {"c"}))
    metrics.media.watch(lambda: MediaStats(num_loaded={"image": 2}, num_refused={"size": 1}))
    metrics.count_end("stop")
    metrics.count_rejected("queue_full")
    metrics.count_restart("scheduler")
    metrics.count_reply("/generate", 200)
    for by_key in (metrics.key_requests, metrics.key_prompt_tokens, metrics.key_generation_tokens):
        by_key.add("team-a", 3)
    metrics.prompt_tokens.inc(5)
    metrics.time_to_first_token_s.observe(0.07)
    metrics.inter_token_latency_s.add(0.004, 3)
    return metrics


def samples(dialect="none"):
    found = {}
    for family in text_string_to_metric_families(render(busy_metrics(), dialect).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found
