"""The benchmark of the scheduler's own time: every turn that it times is a decode turn of all rows."""

import pytest

from bench import scheduler_turn


@pytest.mark.parametrize(("num_rows", "stream"), [(3, True), (3, False), (256, True)])
def test_every_timed_turn_decodes_every_row(num_rows, stream):
    scheduler = scheduler_turn.decoding(num_rows, num_turns=40, stream=stream)
    before = [req.num_outputs for req in scheduler.state.running]
    for _ in range(40):
        scheduler.run_once()

    assert [req.num_outputs - made for req, made in zip(scheduler.state.running, before, strict=True)] == [
        40
    ] * num_rows
    assert scheduler.state.counters.num_finished == 0


def test_the_report_has_a_row_for_each_number_of_rows():
    row = scheduler_turn.measure(num_rows=2, num_turns=20, stream=True)

    assert (row["rows"], row["turns"]) == (2, 20)
    assert row["min_ms"] <= row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
