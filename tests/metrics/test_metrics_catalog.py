"""What is counted is what Prometheus reads."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

from headrace.messages.control import InternalState, PoolState, TierStats
from headrace.messages.grammar import GrammarStats
from headrace.messages.media import EncodingStats, MediaStats
from headrace.messages.outputs import SpeculationCounts
from headrace.metrics.catalog import MAX_KEY_NAMES, OTHER_KEYS, Metrics
from headrace.metrics.export import render
from headrace.version import VERSION

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def values(metrics):
    """Every sample by (name without prefix, labels other than the model and bucket)."""
    found = {}
    for family in text_string_to_metric_families(render(metrics).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            found[(sample.name.removeprefix("headrace:"), *labels.values())] = sample.value
    return found


def loaded(metrics):
    """Items that the loader gave to requests, by kind."""
    return {key[1]: int(value) for key, value in values(metrics).items() if key[0] == "media_loaded_total"}


def state(**changes):
    fields = {
        "pool": PoolState(1000, 400, 350, 250, 8, 6, True),
        "num_running": 2,
        "num_waiting": 3,
        "num_in_flight_steps": 1,
        "num_steps": 9,
        "num_retracted": 4,
        "num_aborted": 0,
        "num_finished": 5,
        "prompt_tokens": 50,
        "generation_tokens": 60,
        "cached_tokens": 10,
        "computed_prefill_tokens": 40,
        "prefix_query_tokens": 40,
        "memory_repairs": 0,
        "dropped_frames": 0,
        "gen_throughput": 12.5,
        "new_token_ratio": 0.5,
        "waiting_tokens": 7,
    }
    return InternalState(**{**fields, **changes})


def test_gauges_are_the_schedulers_last_state():
    metrics = Metrics("tiny")
    metrics.set_scheduler_state(state(num_running=8))
    metrics.set_scheduler_state(state())
    metrics.set_scheduler_state(state(num_running=5, replica=1))

    got = values(metrics)
    assert got[("num_running_reqs", "1")] == 5

    want = {
        "num_running_reqs": 2,
        "num_queue_reqs": 3,
        "gen_throughput": 12.5,
        "token_usage": 0.25,
        "kv_available_tokens": 400,
        "kv_evictable_tokens": 350,
        "cache_hit_rate": 0.25,
    }
    assert {name: got[(name, "0")] for name in want} == want


def test_counters_of_replicas_add_up_each_from_its_own():
    metrics = Metrics("tiny")
    for replica, retracted in ((0, 4), (1, 10), (0, 5), (1, 12)):
        metrics.set_scheduler_state(state(num_retracted=retracted, replica=replica))
    metrics.count_restart("scheduler 1")
    metrics.replayed_requests.inc(3)

    got = values(metrics)

    assert got[("retracted_requests_total",)] == 5 + 12
    assert got[("restarts_total", "scheduler 1")] == 1
    assert got[("replayed_requests_total",)] == 3


def test_counters_of_the_scheduler_add_up_also_when_it_was_started_again():
    metrics = Metrics("tiny")
    for retracted, queried in ((4, 40), (6, 100), (1, 30)):
        metrics.set_scheduler_state(state(num_retracted=retracted, prefix_query_tokens=queried))

    got = values(metrics)

    assert got[("retracted_requests_total",)] == 6 + 1
    assert got[("prefix_query_tokens_total",)] == 100 + 30


def test_the_schedulers_time_a_step_is_counted_beside_the_steps():
    metrics = Metrics("tiny")
    for steps, host_s, forward_s in ((2, 0.25, 1.0), (6, 0.75, 3.0), (1, 0.5, 0.5)):
        metrics.set_scheduler_state(state(num_steps=steps, host_s=host_s, forward_s=forward_s))

    got = values(metrics)

    assert got[("steps_total",)] == 6 + 1
    assert got[("scheduler_host_seconds_total",)] == 0.75 + 0.5
    assert got[("step_seconds_total",)] == 3.0 + 0.5


def test_what_grammars_cost_is_counted():
    metrics = Metrics("tiny")
    for queued, sat_out, masks_s in ((3, 2, 0.5), (1, 6, 1.25), (0, 1, 0.25)):
        metrics.set_scheduler_state(state(num_grammar_queue=queued, num_sat_out=sat_out, masks_s=masks_s))

    got = values(metrics)

    assert [value for key, value in got.items() if key[0] == "num_grammar_queue_reqs"] == [0.0]
    assert got[("grammar_sat_out_rows_total",)] == 6 + 1
    assert got[("grammar_mask_seconds_total",)] == 1.25 + 0.25


def test_what_becomes_of_grammars_is_counted_over_restarts():
    metrics = Metrics("tiny")
    for compiled, hits, refused, killed, cached_bytes in ((3, 5, 1, 0, 700), (4, 9, 3, 2, 900), (1, 0, 2, 1, 100)):
        stats = GrammarStats(compiled, hits, refused, killed, 1, cached_bytes)
        metrics.set_scheduler_state(state(grammars=stats))

    got = values(metrics)

    assert got[("grammar_compiles_total",)] == 4 + 1
    assert got[("grammar_cache_hits_total",)] == 9
    assert got[("grammar_refusals_total",)] == 3 + 2
    assert got[("grammar_kills_total",)] == 2 + 1
    assert [value for key, value in got.items() if key[0] == "grammar_cache_bytes"] == [100]


def test_what_the_tier_has_kept_is_counted_over_restarts():
    metrics = Metrics("tiny")
    for stored, loaded_tokens, dropped, damaged in ((32, 16, 1, 0), (64, 16, 2, 1), (16, 0, 0, 0)):
        metrics.set_scheduler_state(state(tier=TierStats(stored, loaded_tokens, dropped, damaged)))

    got = values(metrics)

    assert got[("kv_tier_stored_tokens_total",)] == 64 + 16
    assert got[("kv_tier_loaded_tokens_total",)] == 16
    assert got[("kv_tier_dropped_total",)] == 2
    assert got[("kv_tier_damaged_files_total",)] == 1


def test_what_is_encoded_is_counted_over_restarts():
    metrics = Metrics("tiny")
    for encoded, failed, hits, tokens, seconds in ((3, 1, 5, 300, 0.5), (4, 2, 9, 400, 1.25), (1, 0, 2, 100, 0.25)):
        metrics.set_scheduler_state(state(encodings=EncodingStats(encoded, failed, hits, tokens, seconds)))

    got = values(metrics)

    assert got[("media_encoded_total",)] == 4 + 1
    assert got[("media_encoding_failures_total",)] == 2
    assert got[("media_encoding_hits_total",)] == 9 + 2
    assert got[("media_encoded_tokens_total",)] == 400 + 100
    assert got[("media_encoding_seconds_total",)] == 1.25 + 0.25


def test_what_the_loader_of_images_has_done_is_read_at_each_scrape():
    metrics = Metrics("tiny")
    assert loaded(metrics) == {"image": 0, "audio": 0, "video": 0}
    metrics.media.watch(lambda: MediaStats({"image": 5}, 2, {"size": 3}, 0.5, 1.5, 4, 700, 1))

    got = values(metrics)

    assert loaded(metrics) == {"image": 5, "audio": 0, "video": 0}
    assert got[("media_cache_hits_total",)] == 2
    assert got[("media_fetch_seconds_total",)] == 0.5
    assert got[("media_decode_seconds_total",)] == 1.5
    assert got[("media_processes_killed_total",)] == 1
    assert [value for key, value in got.items() if key[0] == "media_refused_total"] == [3]
    assert [value for key, value in got.items() if key[0] == "media_cache_bytes"] == [700]


def test_guesses_of_all_replicas_are_counted_over_restarts():
    metrics = Metrics("tiny")
    for replica, rows, drafted, right in ((0, 4, 20, 8), (1, 2, 6, 1), (0, 5, 22, 10), (1, 1, 3, 0)):
        metrics.set_scheduler_state(state(replica=replica, speculation=SpeculationCounts(rows, drafted, right)))

    got = values(metrics)

    assert got[("spec_verify_rows_total",)] == 5 + 2 + 1
    assert got[("spec_draft_tokens_total",)] == 22 + 6 + 3
    assert got[("spec_accepted_tokens_total",)] == 10 + 1 + 0
    assert [value for key, value in got.items() if key[0] == "spec_accept_length"] == [3.0, 1.0]


def test_the_time_of_steps_with_prompts_is_counted_beside_what_was_expected():
    metrics = Metrics("tiny")
    for steps, took_s, expected_s in ((2, 0.5, 0.25), (4, 1.0, 1.5), (1, 0.25, 0.125)):
        metrics.set_scheduler_state(
            state(prompt_steps=steps, prompt_steps_s=took_s, prompt_steps_expected_s=expected_s)
        )

    got = values(metrics)

    assert got[("prompt_steps_total",)] == 4 + 1
    assert got[("prompt_step_seconds_total",)] == 1.0 + 0.25
    assert got[("prompt_step_expected_seconds_total",)] == 1.5 + 0.125


def test_the_tally_of_token_latencies_is_a_histogram():
    metrics = Metrics("tiny")
    for seconds, count in ((0.005, 3), (0.011, 2), (60.0, 1)):
        metrics.inter_token_latency_s.add(seconds, count)

    got = values(metrics)

    name = "inter_token_latency_seconds"
    assert got[(f"{name}_count",)] == 6
    assert abs(got[(f"{name}_sum",)] - 60.037) < 1e-9
    # A bound belongs to its bucket, as in every histogram of Prometheus.
    assert [got[(f"{name}_bucket", le)] for le in ("0.002", "0.005", "0.01", "0.02", "5.0", "+Inf")] == [
        0,
        3,
        3,
        5,
        5,
        6,
    ]


def test_ends_are_counted_by_their_reason():
    metrics = Metrics("tiny")
    for reason in ("stop", "stop", "length", "abort"):
        metrics.count_end(reason)

    got = values(metrics)

    assert {reason: got[("requests_total", reason)] for reason in ("stop", "length", "abort")} == {
        "stop": 2,
        "length": 1,
        "abort": 1,
    }
    assert got[("aborted_requests_total",)] == 1


def test_keys_are_counted_by_name_up_to_a_number_of_names():
    metrics = Metrics("tiny")
    metrics.key_requests.add("", 7)
    for number in range(MAX_KEY_NAMES + 2):
        metrics.key_requests.add(f"key-{number}", 1)
    metrics.key_requests.add("key-0", 4)

    counted = {key[1]: value for key, value in values(metrics).items() if key[0] == "key_requests_total"}

    assert len(counted) == MAX_KEY_NAMES + 1
    assert (counted["key-0"], counted["key-1"], counted[OTHER_KEYS]) == (5, 1, 2)


def test_replies_are_counted_by_route_and_status():
    metrics = Metrics("tiny")
    for route, status in (("/generate", 200), ("/generate", 200), ("/generate", 429), ("unknown", 404)):
        metrics.count_reply(route, status)

    got = values(metrics)

    counted = {key[1:]: value for key, value in got.items() if key[0] == "http_requests_total"}
    assert counted == {("/generate", "200"): 2, ("/generate", "429"): 1, ("unknown", "404"): 1}
    [build] = [(set(key[1:]), value) for key, value in got.items() if key[0] == "build_info"]
    assert build == ({VERSION, platform.python_version()}, 1)


def test_the_use_of_processes_is_what_prometheus_own_collector_says():
    metrics = Metrics("tiny")
    program = [sys.executable, "-c", "print('up', flush=True); input()"]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    metrics.processes.watch(lambda: [("child", child.pid)])
    sources = {"main": os.getpid(), "child": child.pid}
    try:
        assert child.stdout.readline() == b"up\n"  # from here on it takes no more memory
        got = values(metrics)
        for process, pid in sources.items():
            theirs = prometheus_client.ProcessCollector(pid=lambda pid=pid: pid, registry=None)
            want = {family.name: family.samples[0].value for family in theirs.collect()}
            assert abs(got[("process_start_time_seconds", process)] - want["process_start_time_seconds"]) < 2
            assert 0 <= want["process_cpu_seconds"] - got[("process_cpu_seconds_total", process)] < 60
            assert 0.5 < got[("process_resident_memory_bytes", process)] / want["process_resident_memory_bytes"] < 2
        assert got[("process_open_fds", "main")] >= 3
    finally:
        child.communicate(b"\n")

    assert {key[1] for key in values(metrics) if key[0] == "process_open_fds"} == {"main"}


def test_token_counters_and_token_histograms_stay_apart():
    metrics = Metrics("tiny")
    for length in (3, 5):
        metrics.prompt_tokens.inc(length)
        metrics.prompt_length.observe(length)
    metrics.generation_tokens.value += 7
    metrics.generation_length.observe(7)

    got = values(metrics)

    assert got[("prompt_tokens_total",)] == got[("request_prompt_tokens_sum",)] == 8
    assert got[("request_prompt_tokens_bucket", "4.0")] == 1
    assert got[("request_prompt_tokens_bucket", "8.0")] == 2
    assert got[("request_prompt_tokens_count",)] == 2
    assert got[("generation_tokens_total",)] == got[("request_generation_tokens_sum",)] == 7


def test_the_documents_name_every_metric_and_no_more_are_promised():
    metrics = Metrics("tiny")
    metrics.count_end("stop")
    documented = set(re.findall(r"`(\w+)[`{]", OPERATIONS.read_text().split("## Metrics and logs")[1].split("\n\n")[0]))

    families = text_string_to_metric_families(render(metrics).decode())
    names = {
        family.name.removeprefix("headrace:") + ("_total" if family.type == "counter" else "") for family in families
    }

    assert names == documented - {"model_name", "headrace"}


def test_the_value_of_adapters_in_use_is_when_they_were_first_seen():
    metrics, running = Metrics("tiny"), {"poet"}
    metrics.lora_requests.watch(4, lambda: (running, ()))

    def seen():
        return {key: value for key, value in values(metrics).items() if key[0] == "lora_requests_info"}

    (before,) = seen().items()
    assert before[0] == ("lora_requests_info", "4", "poet", "")
    assert seen() == dict([before])
    running.add("cook")
    (after,) = seen().items()
    assert after[0] == ("lora_requests_info", "4", "cook,poet", "")
    assert after[1] >= before[1] > 0
