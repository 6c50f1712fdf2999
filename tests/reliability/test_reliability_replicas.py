"""Two replicas behind one server: the same answers as one, spread over both, and the death of one goes unnoticed, also where there
are adapters."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import transformers
from reliability_harness import (
    MAX_TOTAL_TOKENS,
    START_S,
    Server,
    Stream,
    check_refused,
    each_at_once,
    greedy,
    wait_until,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from lora_harness import tiny_adapter

NUM_TOKENS = 150
NAMES = ("start", "late", None)
"""Adapters, the last one none."""
PROMPTS = [f"Verse {i} begins: " for i in range(10)]


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of three adapters."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("adapters")
    return {name: tiny_adapter(model, seed=i).save(folder / name) for i, name in enumerate(("start", "gone", "late"))}


@pytest.fixture(scope="module")
def replicas(tiny_model: Path, adapters: dict[str, str]) -> Iterator[Server]:
    options = ("--dp-size", "2", "--load-balance-method", "shortest_queue", "--max-restarts", "9")
    loras = ("--max-loras", "2", "--lora-paths", f"start={adapters['start']},gone={adapters['gone']}")
    with Server(tiny_model, options + loras) as server:
        yield server.wait_started()
        assert server.stop() == 0
        assert [path.name for path in server.folder.iterdir()] == ["log"]


@pytest.fixture
def client(replicas: Server) -> Iterator[httpx.Client]:
    with replicas.client() as client:
        yield client


def schedulers(server: Server) -> list[psutil.Process]:
    return [child for child in server.process.children() if "scheduler" in child.cmdline()]


def kill_first(server: Server) -> None:
    """The scheduler of replica 0, known by the socket that it reads."""
    (victim,) = [
        child
        for child in schedulers(server)
        if any(str(socket.laddr).endswith("/to_scheduler") for socket in child.net_connections(kind="unix"))
    ]
    victim.kill()


def body_of(i: int) -> dict[str, Any]:
    return {"text": PROMPTS[i], "sampling_params": greedy(NUM_TOKENS)}


def answers(client: httpx.Client) -> list[tuple[str, list[int]]]:
    replies = each_at_once(lambda i: client.post("/generate", json=body_of(i)).json(), range(len(PROMPTS)))
    return [(reply["text"], reply["output_ids"]) for reply in replies]


def test_answers_are_those_of_one_and_both_work(replicas: Server, client: httpx.Client, server: Server):
    with server.client() as alone:
        want = answers(alone)

    assert answers(client) == want

    state = replicas.state()
    assert [part["dp_rank"] for part in state["replicas"]] == [0, 1]
    assert all(part["num_finished"] > 0 for part in state["replicas"])
    assert state["num_finished"] == sum(part["num_finished"] for part in state["replicas"])
    loads = client.get("/v1/loads").json()["loads"]
    assert [load["dp_rank"] for load in loads] == [0, 1]
    metrics = client.get("/metrics").text
    for replica in (0, 1):
        assert f'headrace:kv_available_tokens{{dp_rank="{replica}",model_name="tiny-llama"}}' in metrics


def pinned(client: httpx.Client) -> tuple[int, dict[str, dict[int, int]]]:
    """Tokens that are pinned on all replicas, and those of each pin by replica."""
    reply = client.get("/v1/cache").json()
    pins = {pin["id"]: {held["dp_rank"]: held["tokens"] for held in pin["held"]} for pin in reply["pins"]}
    return reply["memory"]["pinned_tokens"], pins


def test_a_pin_is_held_by_every_replica_or_by_the_one_that_is_named(replicas: Server, client: httpx.Client):
    prompt = "The rules of this house are many. " * 6

    def num_cached(rank: int, text: str) -> int:
        body = {"text": text + "And so?", "sampling_params": greedy(1), "routed_dp_rank": rank}
        return client.post("/generate", json=body).json()["meta_info"]["cached_tokens"]

    replicas.flush()
    everywhere = client.post("/v1/cache/pin", json={"prompt": prompt}).json()
    there = client.post("/v1/cache/pin", json={"prompt": "Elsewhere " + prompt, "routed_dp_rank": 1}).json()
    total, pins = pinned(client)
    num, num_there = everywhere["tokens"], there["tokens"]
    assert pins == {everywhere["id"]: {0: num, 1: num}, there["id"]: {1: num_there}}
    assert total == 2 * num + num_there
    assert all(num_cached(rank, prompt) >= num for rank in (0, 1))
    assert num_cached(1, "Elsewhere " + prompt) >= num_there > num_cached(0, "Elsewhere " + prompt)

    kill_first(replicas)
    wait_until(lambda: pinned(client) == (total, pins), "both are held where they were", START_S)
    assert num_cached(0, prompt) >= num

    for pin in (everywhere, there):
        assert client.post("/v1/cache/unpin", json={"id": pin["id"]}).json()["success"]
    wait_until(lambda: pinned(client) == (0, {}), "what is made again just now is let go, too", START_S)
    memory = client.get("/v1/cache").json()["memory"]
    assert memory["limit_tokens"] == 2 * MAX_TOTAL_TOKENS
    assert memory["tokens"] == memory["evictable_tokens"], "nothing is kept from eviction on any replica"


def test_a_flush_reaches_both_and_health_asks_both(replicas: Server, client: httpx.Client):
    answers(client)
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
    want = answers(client)
    replicas.inject("forward", "sleep", "holds", at_token=100, seconds=300.0)
    body = {"text": "hold", "rid": "holds", "routed_dp_rank": 0, "sampling_params": greedy(120)}
    held = Stream(client, "/generate", body)
    assert held.began.wait(START_S)
    streams = [Stream(client, "/generate", body_of(i), stream=i % 2 == 0) for i in range(len(PROMPTS))]
    wait_until(lambda: num_tokens(held) >= 98, "the first replica stands still", START_S)
    deaths, restarts = num_deaths(replicas), num_restarts(client)

    kill_first(replicas)
    wait_until(lambda: num_deaths(replicas) > deaths, "the death is noticed")
    assert client.get("/health").status_code == 200, "the other one serves"
    for stream in streams:
        stream.join(START_S)
    held.join(START_S)

    assert [(stream.last["text"], stream.last["output_ids"]) for stream in streams] == want
    assert held.last["meta_info"]["completion_tokens"] == 120
    wait_until(lambda: len(replicas.state()["replicas"]) == 2, "it is back", START_S)
    assert len(schedulers(replicas)) == 2
    assert num_restarts(client) == restarts + 1


def adapted(client: httpx.Client, replica: int) -> list[str]:
    replies = [client.post("/generate", json=adapted_body(name, replica)) for name in NAMES]
    assert [reply.status_code for reply in replies] == [200] * len(NAMES), [reply.text for reply in replies]
    return [reply.json()["text"] for reply in replies]


def adapted_body(name: str | None, replica: int) -> dict[str, Any]:
    return {"text": "Verse: ", "lora_path": name, "routed_dp_rank": replica, "sampling_params": greedy(120)}


def test_a_dead_replica_comes_back_with_the_adapters_of_now(
    replicas: Server, client: httpx.Client, adapters: dict[str, str]
):
    for path, body in (
        ("/unload_lora_adapter", {"lora_name": "gone"}),
        ("/load_lora_adapter", {"lora_name": "late", "lora_path": adapters["late"]}),
    ):
        reply = replicas.admin.post(path, json=body)
        assert reply.status_code == 200, reply.text
    want = adapted(client, 0)
    assert adapted(client, 1) == want
    assert len(set(want)) == len(NAMES)

    replicas.inject("forward", "sleep", "holds", at_token=60, seconds=300.0)
    streams = [Stream(client, "/generate", adapted_body(name, 0)) for name in NAMES if name != "late"]
    assert all(stream.began.wait(START_S) for stream in streams)
    # The last to come, for nobody is served behind it.
    streams.insert(1, Stream(client, "/generate", adapted_body("late", 0) | {"rid": "holds"}))
    wait_until(lambda: num_tokens(streams[1]) > 50, "it stands still", START_S)
    kill_first(replicas)
    for stream in streams:
        stream.join(START_S)

    assert [stream.last["text"] for stream in streams] == want
    assert adapted(client, 0) == want
    assert adapted(client, 1) == want
    assert client.post("/generate", json=adapted_body("gone", 0)).status_code == 404


def num_deaths(server: Server) -> int:
    return server.log().count("scheduler 0 process died")


def num_restarts(client: httpx.Client) -> float:
    """Of the first replica's scheduler, as the metrics count them."""
    line = re.compile(r'^headrace:restarts_total\{model_name="tiny-llama",process="scheduler 0"\} (.*)$', re.M)
    return sum(float(count) for count in line.findall(client.get("/metrics").text))


def num_tokens(stream: Stream) -> int:
    """How many have come so far. Chunks may carry several."""
    return stream.last["meta_info"]["completion_tokens"] if stream.payloads else 0
