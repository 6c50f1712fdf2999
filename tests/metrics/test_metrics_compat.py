"""Other servers' names, and the dashboard: what they name exists and is ours."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.messages.control import InternalState, PoolState
from headrace.metrics.catalog import Metrics
from headrace.metrics.compat import NAMES
from headrace.metrics.export import render

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana.json"
NAME = re.compile(r"headrace:\w+|\bprocess_\w+(?={)")
STATE = InternalState(
    PoolState(1000, 400, 350, 250, 8, 6, True), 2, 3, 0, 9, 4, 0, 5, 50, 60, 10, 40, 40, 0, 0, 12.5, 0.5, 7
)


def busy_metrics():
    metrics = Metrics("tiny")
    metrics.set_scheduler_state(STATE)
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


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_every_other_name_has_our_value(dialect):
    got = samples(dialect)

    for ours, theirs in NAMES[dialect]:
        for suffix in ("", "_total", "_count", "_sum", "_bucket"):
            here, there = got.get(f"headrace:{ours}{suffix}"), got.get(f"{dialect}:{theirs}{suffix}")
            assert (here is None) == (there is None), (ours, suffix)
            if here is not None:
                assert [value for _, value in here] == [value for _, value in there]
    assert not [name for name in samples() if name.startswith(f"{dialect}:")]


def test_well_known_names_are_spelled_as_their_dashboards_do():
    vllm, sglang = samples("vllm"), samples("sglang")

    assert vllm["vllm:num_requests_running"][0][1] == 2
    assert vllm["vllm:kv_cache_usage_perc"][0][1] == 0.25
    assert vllm["vllm:request_success_total"] == [({"model_name": "tiny", "finished_reason": "stop"}, 1.0)]
    assert vllm["vllm:num_preemptions_total"][0][1] == 4
    assert vllm["vllm:time_to_first_token_seconds_count"][0][1] == 1
    assert sglang["sglang:num_queue_reqs"][0][1] == 3
    assert sglang["sglang:prompt_tokens_total"][0][1] == 5
    assert sglang["sglang:inter_token_latency_seconds_count"][0][1] == 3


def test_the_dashboard_shows_metrics_that_exist_with_labels_that_they_have():
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    exported = samples()

    assert len(queries) > 20
    for query in queries:
        names = NAME.findall(query)
        assert names, query
        for name in names:
            assert name in exported, query
            for label in re.findall(r"by \((\w+)\)", query):
                assert label in exported[name][0][0], query
    shown = {re.sub(r"_bucket$", "", name) for query in queries for name in NAME.findall(query)}
    ours = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported}
    assert ours - shown == set()
