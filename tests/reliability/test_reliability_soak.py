"""The soak in its shortest form finds nothing, and what it measures is right."""

import pytest

from bench.soak import KINDS, MB, Sample, first_and_last, parse, slope_per_hour, soak


def test_the_slope_leaves_the_warm_up_out_and_throughput_compares_ends():
    warm = [Sample(float(i), 100 * MB + i * 50 * MB, i * 10) for i in range(20)]
    flat = [Sample(float(i), 1100 * MB + i * MB // 3600, 200 + (i - 20) * 5) for i in range(20, 100)]
    assert slope_per_hour(warm + flat) / MB == pytest.approx(1.0, rel=0.1)
    assert slope_per_hour(warm[:2]) == 0.0
    first, last = first_and_last(warm + flat)
    assert first > 7.0
    assert last == pytest.approx(5.0)


async def test_a_short_soak_with_kills_finds_no_problem(tiny_model):
    options = ["--minutes", "0.04", "--model", str(tiny_model), "--clients", "6", "--max-total-tokens", "2048"]
    report = await soak(parse([*options, "--kill-every-s", "1"]))

    assert report["problems"] == []
    assert report["requests"]["chat"] > 0
    assert set(report["requests"]) <= {name for name, _ in KINDS} | {"shed"}
    assert report["duration_s"] >= 2.4
    assert report["num_kills"] > 0
    assert report["num_replayed"] > 0
