"""Other servers' names, and the dashboard: what they name exists and is ours."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from exported_metrics import busy_metrics, samples

from headrace.metrics.export import NAMES, render

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana.json"
NAME = re.compile(r"headrace:\w+|\bprocess_\w+(?={)")


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
    cache = {"model_name": "tiny", "engine": "0", "block_size": "16", "num_gpu_blocks": "62"}
    assert vllm["vllm:cache_config_info"] == [(cache, 1.0)]
    adapters = {"max_lora": "8", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert vllm["vllm:lora_requests_info"][0][0] == {"model_name": "tiny"} | adapters
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


def test_underscored_names_replace_ours_with_the_same_samples():
    ours, underscored = samples(), samples("underscore")

    del ours["process_cpu_seconds_total"], underscored["process_cpu_seconds_total"]  # it moves
    for memory in (ours, underscored):
        del memory["process_resident_memory_bytes"]
    del ours["headrace:lora_requests_info"], underscored["headrace_lora_requests_info"]  # the time
    assert {name.replace("headrace:", "headrace_"): found for name, found in ours.items()} == underscored
    assert not [name for name in underscored if not re.fullmatch(r"(headrace|process)(_[a-z0-9]+)+", name)]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say_about_underscored_names():
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=render(busy_metrics(), "underscore"), capture_output=True, timeout=60
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
