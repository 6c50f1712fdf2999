"""The short form of each attack on a server: what it does to others, or to itself, is bounded."""

import http.client
import sys
import time
from pathlib import Path

import crowding
import memory
import pytest
from crowding import ATTACKS, BYSTANDER, SENT, SMALL, ask, attacking, serving
from killed_children import attack

HEADRACE = [str(Path(sys.executable).with_name("headrace"))]
SERVERS = {
    "text": ("text", "few descriptors", "few pages"),
    "embedding": ("embedding",),
    "vision": ("vision",),
}
"""Which attacks of the long form one server of the short form bears."""
PATIENCE_S = 60
"""A small request of another key had not been answered after so long, beside most of these attacks, while all stood in one line."""


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


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_a_small_request_of_another_key_is_answered_beside_each_attack(server, monkeypatch):
    monkeypatch.setattr(crowding, "TIMEOUT_S", PATIENCE_S)
    options = [*crowding.SERVERS["few pages" if server == "text" else server]]
    refused = []
    with serving(HEADRACE, options, few_descriptors=True) as (url, _):
        for name in (name for name, each in ATTACKS.items() if each.server in SERVERS[server]):
            with attacking(name, url) as work:
                while work[SENT] < min(ATTACKS[name].at_once, 4):
                    time.sleep(0.02)
                for number, kind in enumerate(crowding.ASKED[server]):
                    path, body = SMALL[kind](name, number)
                    if ask(url, path, body, BYSTANDER)[0] != http.client.OK:
                        refused.append((name, kind))
    assert refused == []
