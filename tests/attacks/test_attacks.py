"""The short form of each attack on a server: what it does to others, or to itself, is bounded."""

from pathlib import Path

import memory
import pytest
from killed_children import attack


@pytest.mark.slow
def test_killed_children_are_not_the_fault_of_clients():
    report = attack(6, twice_every=2)
    assert report["wrong"] == []
    assert report["answered as the client's fault"] == 0
    assert min(report["killed at work"].values()) >= 3
    for answers in report["answers"].values():
        assert answers["200"] > 0
        assert answers["200 when sent again"] > 0


@pytest.mark.slow
def test_weights_and_adapters_that_come_and_go_leave_no_memory_behind(tmp_path: Path):
    with memory.server(max_total_tokens=2048) as (runtime, scheduler):
        load = memory.Load(runtime.url, num_clients=1)
        load.start()
        try:
            held = []
            for number in range(9):
                memory.change(runtime, load, tmp_path, number)
                held.append(memory.private_mb(scheduler)["all"])
        finally:
            load.stop()
    assert set(load.answers) == {200}
    # The weights are 92 MB: every one that is kept would show.
    assert held[-1] - max(held[:4]) < 60, held
