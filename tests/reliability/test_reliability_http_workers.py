"""Two HTTP workers behind one socket (--tokenizer-worker-num): answers, limits and control are those of one server; a death costs its own."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from reliability_harness import START_S, Server, Stream, each_at_once, greedy, is_taken, wait_until

NUM_STREAMS = 12


@pytest.fixture(scope="module")
def workers(tiny_model: Path) -> Iterator[Server]:
    with Server(tiny_model, ("--tokenizer-worker-num", "2", "--max-restarts", "9"), keys=True) as server:
        yield server.wait_started()
        check_that_a_stop_lets_streams_end(server)
        assert [path.name for path in server.folder.iterdir()] == ["log"]


@pytest.fixture
def clients(workers: Server) -> Iterator[list[httpx.Client]]:
    """Connections of their own: each may be with either worker."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(workers.client()) for _ in range(8)]


def http_workers(server: Server) -> list[psutil.Process]:
    live = [child for child in server.process.children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in live if "http" in child.cmdline()]


def prompt_tokens_line(client: httpx.Client) -> str:
    """The line of /metrics that counts the prompt tokens of all requests."""
    (line,) = (line for line in client.get("/metrics").text.splitlines() if "prompt_tokens_total{" in line)
    return line


def body_of(i: int) -> dict[str, Any]:
    return {"text": f"Verse {i} begins: ", "sampling_params": greedy(40), "stream": i % 2 == 0}


def answer(server: Server, i: int) -> tuple[str, list[int]]:
    """Over a connection of its own, which either worker may take."""
    with server.client() as client:
        stream = Stream(client, "/generate", body_of(i), stream=i % 2 == 0)
        stream.join(START_S)
    return stream.last["text"], stream.last["output_ids"]


def test_answers_are_those_of_one_process(workers: Server, server: Server):
    want = [answer(server, i) for i in range(NUM_STREAMS)]

    assert each_at_once(lambda i: answer(workers, i), range(NUM_STREAMS)) == want
    state = workers.state()
    assert (state["num_running"], state["num_waiting"]) == (0, 0)
    assert len(http_workers(workers)) == 2


def test_rids_keys_and_control_are_one_for_all_workers(workers: Server, clients: list[httpx.Client]):
    workers.inject("forward", "sleep", "mine", at_token=2, seconds=1.0)
    held = Stream(clients[0], "/generate", {"text": "hold", "rid": "mine", "sampling_params": greedy(200)})
    assert held.began.wait(START_S)

    assert all(is_taken(client, "mine") for client in clients), "whichever worker answers"
    assert {client.post("/flush_cache").status_code for client in clients} == {401}, "not with a user's key"
    assert clients[1].post("/abort_request", json={"rid": "mine"}).status_code == 200
    held.join(START_S)

    assert held.last["meta_info"]["finish_reason"]["type"] == "abort"
    assert len({prompt_tokens_line(client) for client in clients}) == 1


def test_a_worker_that_dies_costs_its_own_streams_and_comes_back(workers: Server, clients: list[httpx.Client]):
    workers.inject("forward", "sleep", "stream 0", at_token=2, seconds=1.0)
    held = [
        Stream(client, "/generate", {"text": "x", "rid": f"stream {i}", "sampling_params": greedy(200)})
        for i, client in enumerate(clients)
    ]
    assert all(stream.began.wait(START_S) for stream in held)
    counted = prompt_tokens_line(workers.admin)

    http_workers(workers)[0].send_signal(signal.SIGKILL)
    for stream in held:
        stream.join(START_S)
    wait_until(lambda: "HTTP worker 0 process is back" in workers.log(), "another worker serves", START_S)
    assert len(http_workers(workers)) == 2
    with workers.client() as client:
        assert prompt_tokens_line(client) == counted, "it asks the engine for no warm-up of its own"

    wait_until(lambda: workers.state()["num_running"] == 0, "what the dead one had is aborted", START_S)
    assert workers.generate(clients[0], "after", 3)["meta_info"]["completion_tokens"] == 3
    assert all(stream.error is not None or stream.last["meta_info"]["completion_tokens"] == 200 for stream in held)
    assert "HTTP worker" in workers.log()


def check_that_a_stop_lets_streams_end(server: Server) -> None:
    with server.client() as client:
        server.inject("forward", "sleep", "slow", at_token=2, seconds=1.0)
        body = {"text": "slow", "rid": "slow", "sampling_params": greedy(60)}
        stream = Stream(client, "/generate", body)
        assert stream.began.wait(START_S)

        assert server.stop(START_S) == 0
        stream.join(START_S)
        assert stream.last["meta_info"]["completion_tokens"] == 60
        with pytest.raises(httpx.TransportError):
            client.get("/health")
