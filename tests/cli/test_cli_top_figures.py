"""Rates, shares and percentiles that `headrace top` makes of two readings of a server's metrics."""

import pytest

from headrace.cli.top_figures import WINDOW_S, Figures, Load, Readings, figures_of_loads, parse_metrics, percentiles
from headrace.messages.control import InternalState, PoolState
from headrace.messages.grammar import GrammarStats
from headrace.metrics.catalog import Metrics
from headrace.metrics.export import render

POOL = PoolState(1000, 400, 350, 250, 8, 6, True)


def state(prefix_query_tokens=0, replica=0):
    return InternalState(
        POOL, 2, 3, 0, 9, 4, 0, 5, 50, 60, 10, 40, prefix_query_tokens, 0, 0, 12.5, 0.5, 7,
        num_grammar_queue=1, grammars=GrammarStats(), replica=replica,
    )  # fmt: skip


def reading(metrics):
    return parse_metrics(render(metrics).decode())


def histogram(*counts, name="x"):
    """Buckets of a text: (upper bound, number of values up to there)."""
    return parse_metrics(
        f"# TYPE headrace:{name} histogram\n"
        + "".join(f'headrace:{name}_bucket{{le="{bound}"}} {count}\n' for bound, count in counts)
    )


def test_the_figures_are_what_a_servers_own_metrics_say():
    metrics, readings = Metrics("tiny"), Readings()
    metrics.set_scheduler_state(state())
    readings.add(10.0, reading(metrics))
    metrics.prompt_tokens.inc(100)
    metrics.cached_tokens.inc(25)
    metrics.set_scheduler_state(state(prefix_query_tokens=100))
    metrics.time_to_first_token_s.observe(0.07)
    metrics.inter_token_latency_s.add(0.004, 30)
    readings.add(12.0, reading(metrics))

    found = readings.figures()

    assert found == Figures(
        output_rate=12.5,
        prompt_rate=50.0,
        num_running=2.0,
        num_waiting=4.0,
        kv_share=0.25,
        hit_rate=0.25,
        ttft_s=pytest.approx((0.05 + 0.5 * 0.05, 0.05 + 0.95 * 0.05)),
        itl_s=pytest.approx((0.002 + 0.5 * 0.003, 0.002 + 0.95 * 0.003)),
    )
    assert list(readings.rates) == [12.5, 12.5]


@pytest.mark.parametrize("names", ["none", "vllm", "sglang", "underscore"])
def test_every_way_to_export_the_metrics_gives_the_same_figures(names):
    metrics, readings = Metrics("tiny"), Readings()
    for replica in (0, 1):
        metrics.set_scheduler_state(state(100, replica))
    metrics.time_to_first_token_s.observe(0.07)
    readings.add(0.0, parse_metrics(render(metrics, names).decode()))

    found = readings.figures(of_all_time=True)

    assert (found.num_running, found.num_waiting, found.kv_share) == (4.0, 8.0, 0.25)
    assert found.ttft_s == pytest.approx((0.075, 0.0975))


def test_one_reading_gives_no_rate_and_no_reading_no_figure():
    readings = Readings()
    assert readings.figures() == Figures()
    readings.add(1.0, reading(Metrics("tiny")))

    found = readings.figures()

    assert (found.prompt_rate, found.ttft_s, found.hit_rate) == (None, None, None)


def test_the_rate_of_prompt_tokens_is_that_of_the_last_seconds():
    metrics, readings = Metrics("tiny"), Readings()
    rates = []
    for second in range(8):
        readings.add(second, reading(metrics))
        rates.append(readings.figures().prompt_rate)
        if second == 0:
            metrics.prompt_tokens.inc(100)
    assert rates == [None, 100.0, 50.0, pytest.approx(100 / 3), 25.0, 20.0, 0.0, 0.0]


def test_latencies_are_those_of_the_window_and_of_all_time_if_asked():
    metrics, readings = Metrics("tiny"), Readings()
    metrics.time_to_first_token_s.observe(100)
    for at_s in range(int(2 * WINDOW_S)):
        readings.add(at_s, reading(metrics))
    metrics.time_to_first_token_s.observe(0.07)
    readings.add(2 * WINDOW_S, reading(metrics))
    assert readings.figures().ttft_s == pytest.approx((0.075, 0.0975))
    assert readings.figures(of_all_time=True).ttft_s[1] > 60

    for second in range(1, int(WINDOW_S)):
        readings.add(2 * WINDOW_S + second, reading(metrics))
        assert readings.figures().ttft_s is not None
    for second in (0, 1):
        readings.add(3 * WINDOW_S + second, reading(metrics))
    assert readings.figures().ttft_s is None


def test_a_restarted_server_counts_from_zero():
    metrics, readings = Metrics("tiny"), Readings()
    metrics.prompt_tokens.inc(1000)
    metrics.inter_token_latency_s.add(5.0, 1000)
    readings.add(0.0, reading(metrics))
    metrics = Metrics("tiny")
    metrics.prompt_tokens.inc(10)
    metrics.inter_token_latency_s.add(0.004, 10)
    readings.add(1.0, reading(metrics))

    found = readings.figures()

    assert found.prompt_rate == 10.0
    assert found.itl_s[1] < 0.005


def test_a_server_that_was_gone_is_not_compared_with_itself_and_its_rates_stay():
    metrics, readings = Metrics("tiny"), Readings()
    for at_s in (0.0, 1.0):
        readings.add(at_s, reading(metrics))
    readings.interrupt()
    metrics.prompt_tokens.inc(10_000)
    metrics.set_scheduler_state(state())
    readings.add(100.0, reading(metrics))

    assert readings.figures().prompt_rate is None
    assert list(readings.rates) == [0.0, 0.0, 12.5]


def test_percentiles_are_linear_within_a_bucket():
    before, now = histogram((1, 0), (2, 0), ("+Inf", 0)), histogram((1, 4), (2, 8), ("+Inf", 8))
    assert percentiles(before, now, "x", (0.25, 0.5, 0.75, 1.0)) == (0.5, 1.0, 1.5, 2.0)
    assert percentiles(now, now, "x", (0.5,)) is None
    assert percentiles({}, {}, "x", (0.5,)) is None


def test_beyond_the_last_bound_a_percentile_is_that_bound():
    assert percentiles({}, histogram((1, 0), (2, 1), ("+Inf", 4)), "x", (0.5, 1.0)) == (2.0, 2.0)


def test_series_of_a_histogram_count_together():
    now = parse_metrics(
        '# TYPE x histogram\nx_bucket{a="1",le="1"} 1\nx_bucket{a="1",le="2"} 1\nx_bucket{a="2",le="1"} 0\nx_bucket{a="2",le="2"} 3\n'
    )
    assert percentiles({}, now, "x", (0.25, 1.0)) == (1.0, 2.0)


@pytest.mark.parametrize("text", ["<html><body>It works!</body></html>", '{"detail": "Not Found"}', "a b c"])
def test_what_is_no_metrics_is_refused(text):
    with pytest.raises(ValueError):
        parse_metrics(text)


def test_loads_stand_in_for_metrics():
    loads = [Load(0, 2, 3, 1, 250, 1000, 0.5, 12.5), Load(1, 1, 0, 0, 750, 1000, 0.0, 2.5)]
    assert figures_of_loads(loads) == Figures(
        output_rate=15.0, num_running=3, num_waiting=4, kv_share=0.5, hit_rate=0.25
    )
    assert figures_of_loads([]).kv_share == 0.0
