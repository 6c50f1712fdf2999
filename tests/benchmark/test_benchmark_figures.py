"""The arithmetic from single requests to reported figures."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.benchmark.figures import (
    Limits,
    RequestRecord,
    distribution,
    over_repetitions,
    percentile,
    summarise,
)


def record(start=0.0, chunks=(0.5, 0.75, 1.0), end=1.25, prompt=10, output=3, error=None):
    return RequestRecord(
        start_s=start, end_s=end, chunk_s=list(chunks), prompt_tokens=prompt, output_tokens=output,
        token_source="usage", error=error,
    )  # fmt: skip


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_that_of_numpy(values, percent):
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)))


def test_percentile_of_one_value_is_the_value():
    assert [percentile([3.0], percent) for percent in (0, 50, 99, 100)] == [3.0] * 4


def test_distribution_of_nothing_has_no_figures():
    assert distribution([]).p50 is None
    assert distribution([]).count == 0


def test_distribution_does_not_need_order():
    got = distribution([4.0, 1.0, 3.0, 2.0])
    assert (got.count, got.mean, got.p50) == (4, 2.5, 2.5)


def test_latencies_of_a_record():
    one = record(start=1.0, chunks=(1.5, 1.75, 2.5), end=3.0, output=5)

    assert one.ttft_s == 0.5
    assert one.gaps_s == [0.25, 0.75]
    assert one.e2e_s == 2.0
    assert one.per_token_s == pytest.approx(1.0 / 4)  # tokens, not chunks, after the first


def test_a_record_without_text_has_no_first_token():
    assert record(chunks=()).ttft_s is None
    assert record(chunks=()).per_token_s is None
    assert record(chunks=(0.5,), output=1).per_token_s is None


def test_rates_are_per_second_of_wall_clock():
    got = summarise([record(), record(prompt=30, output=5)], duration_s=2.0, limits=Limits())

    assert got.request_throughput == 1.0
    assert got.prompt_throughput == 20.0
    assert got.output_throughput == 4.0
    assert got.total_throughput == 24.0


def test_failed_requests_count_as_errors_and_in_nothing_else():
    failed = record(prompt=1000, output=1000, chunks=(9.0,), end=99.0, error="HTTP 500")

    got = summarise([record(), failed, failed], duration_s=1.0, limits=Limits(e2e_s=100.0))

    assert (got.num_requests, got.num_errors) == (3, 2)
    assert got.errors == {"HTTP 500": 2}
    assert got.output_tokens == 3
    assert got.e2e_s.count == 1
    assert got.good_requests == 1


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(ttft_s=0.5), 1),
        (Limits(ttft_s=0.49), 0),
        (Limits(per_token_s=0.25), 1),
        (Limits(per_token_s=0.24), 0),
        (Limits(e2e_s=1.25), 1),
        (Limits(ttft_s=1.0, e2e_s=1.0), 0),
    ],
)
def test_goodput_counts_requests_within_every_limit(limits, good):
    got = summarise([record()], duration_s=2.0, limits=limits)

    assert (got.good_requests, got.goodput) == (good, good / 2)


def test_without_limits_there_is_no_goodput():
    assert summarise([record()], 1.0, Limits()).goodput is None


def test_median_and_spread_over_repetitions():
    summaries = [summarise([record()], duration_s, Limits()) for duration_s in (1.0, 2.0, 4.0)]

    median, spread = over_repetitions(summaries)

    assert median["output_throughput"] == statistics.median([3.0, 1.5, 0.75])
    assert spread["output_throughput"] == pytest.approx((3.0 - 0.75) / 1.5)
    assert median["ttft_s"]["p99"] == 0.5
    assert "goodput" not in median


def test_a_figure_missing_from_one_repetition_is_left_out():
    summaries = [summarise([record()], 1.0, Limits()), summarise([record(error="x")], 1.0, Limits())]

    median, _ = over_repetitions(summaries)

    assert "mean" not in median["ttft_s"]
    assert median["num_errors"] == 0.5


def test_tokens_counted_in_two_ways_are_said_to_be():
    by_chunks = record()
    by_chunks.token_source = "chunks"

    assert summarise([record(), by_chunks], 1.0, Limits()).token_source == "chunks+usage"
