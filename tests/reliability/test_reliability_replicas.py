"""Two replicas behind one server: the same answers as one, spread over both, and the death of one goes unnoticed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from reliability_harness import START_S, Server, Stream, check_refused, each_at_once, greedy, wait_until

NUM_TOKENS = 150
PROMPTS = [f"Verse {i} begins: " for i in range(10)]


@pytest.fixture(scope="module")
def replicas(tiny_model: Path) -> Iterator[Server]:
    options = ("--dp-size", "2", "--load-balance-method", "shortest_queue", "--max-restarts", "9")
    with Server(tiny_model, options) as server:
        yield server.wait_started()
        assert server.stop() == 0
        assert [path.name for path in server.folder.iterdir()] == ["log"]


@pytest.fixture
def client(replicas: Server) -> Iterator[httpx.Client]:
    with replicas.client() as client:
        yield client


def schedulers(server: Server) -> list[int]:
    return sorted(child.pid for child in server.process.children() if "scheduler" in child.cmdline())


def body_of(i: int) -> dict[str, Any]:
    return {"text": PROMPTS[i], "sampling_params": greedy(NUM_TOKENS)}


def answers(server: Server, client: httpx.Client) -> list[tuple[str, list[int]]]:
    replies = each_at_once(lambda i: client.post("/generate", json=body_of(i)).json(), range(len(PROMPTS)))
    return [(reply["text"], reply["output_ids"]) for reply in replies]


def test_answers_are_those_of_one_and_both_work(replicas: Server, client: httpx.Client, tiny_model: Path):
    with Server(tiny_model) as one, one.wait_started().client() as alone:
        want = answers(one, alone)

    assert answers(replicas, client) == want

    state = replicas.state()
    assert [part["dp_rank"] for part in state["replicas"]] == [0, 1]
    assert all(part["num_finished"] > 0 for part in state["replicas"])
    assert state["num_finished"] == sum(part["num_finished"] for part in state["replicas"])
    loads = client.get("/v1/loads").json()["loads"]
    assert [load["dp_rank"] for load in loads] == [0, 1]
    metrics = client.get("/metrics").text
    for replica in (0, 1):
        assert f'headrace:kv_available_tokens{{dp_rank="{replica}",model_name="tiny-llama"}}' in metrics


def test_a_flush_reaches_both_and_health_asks_both(replicas: Server, client: httpx.Client):
    answers(replicas, client)
    assert all(part["pool"]["evictable_tokens"] > 0 for part in replicas.state()["replicas"])
    replicas.flush()
    assert all(part["pool"]["evictable_tokens"] == 0 for part in replicas.state()["replicas"])
    assert client.get("/health_generate").status_code == 200


def test_a_named_replica_gets_the_request_and_an_unknown_one_is_refused(replicas: Server, client: httpx.Client):
    before = [part["num_finished"] for part in replicas.state()["replicas"]]
    for _ in range(4):
        replicas.generate(client, "named", 4, routed_dp_rank=1)
    after = [part["num_finished"] for part in replicas.state()["replicas"]]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 4]
    check_refused(client.post("/generate", json={"text": "x", "routed_dp_rank": 2}))


def test_when_one_dies_under_load_its_requests_go_on_and_it_comes_back(replicas: Server, client: httpx.Client):
    want = answers(replicas, client)
    replicas.inject("forward", "sleep", "holds", at_token=100, seconds=300.0)
    body = {"text": "hold", "rid": "holds", "routed_dp_rank": 0, "sampling_params": greedy(120)}
    held = Stream(client, "/generate", body)
    assert held.began.wait(START_S)
    streams = [Stream(client, "/generate", body_of(i), stream=i % 2 == 0) for i in range(len(PROMPTS))]
    wait_until(lambda: num_tokens(held) >= 98, "the first replica stands still", START_S)
    pids = schedulers(replicas)
    victim = next(c for c in replicas.process.children() if "scheduler" in c.cmdline() and c.pid == min(pids))

    victim.kill()
    wait_until(lambda: "scheduler 0 process died" in replicas.log(), "the death is noticed")
    assert client.get("/health").status_code == 200, "the other one serves"
    for stream in streams:
        stream.join(START_S)
    held.join(START_S)

    assert [(stream.last["text"], stream.last["output_ids"]) for stream in streams] == want
    assert held.last["meta_info"]["completion_tokens"] == 120
    wait_until(lambda: len(replicas.state()["replicas"]) == 2, "it is back", START_S)
    assert len(schedulers(replicas)) == 2
    assert 'headrace:restarts_total{model_name="tiny-llama",process="scheduler 0"} 1.0' in client.get("/metrics").text


def num_tokens(stream: Stream) -> int:
    return stream.last["meta_info"]["completion_tokens"] if stream.payloads else 0
