"""Clients that leave, hurry, abort and mix good with bad: what they asked for stops, and nobody else notices."""

import json
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest
from reliability_harness import MAX_RUNNING, MODEL, USER_KEY, Server, Stream, each_at_once, greedy, is_taken, wait_until

LONG = 900
# Long enough for everything that must arrive while the scheduler stands still, also on a busy machine.
HOLD_S = 1.5
LEAVE_S = 1.0

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "a", "temperature": 0, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": greedy(LONG)},
    "/v1/completions": COMPLETION | {"max_tokens": LONG},
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": LONG,
    },
}


def is_idle(server: Server) -> bool:
    state = server.state()
    return bool(state["num_running"] == state["num_waiting"] == 0)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("at_token", [0, 8])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_request(server: Server, path: str, at_token: int, stream: bool):
    made = server.state()["generation_tokens"]
    # The step that makes this token takes a while: the client is gone before it has ended.
    server.inject("forward", "sleep", "leaves", at_token=at_token, seconds=LEAVE_S)
    connection = server.raw_post(path, BODIES[path] | {"rid": "leaves", "stream": stream})
    if stream and at_token:
        received = b""
        while b"data: {" not in received:
            received += connection.recv(65536)
    else:
        wait_until(lambda: "injected fault: sleep" in server.log()[-400:], "the request runs")
    connection.close()

    wait_until(lambda: is_idle(server), "the request has stopped")
    # Two steps may have been planned ahead of the abort.
    assert server.state()["generation_tokens"] - made <= at_token + 3


@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_while_queued_costs_no_prefill(server: Server, client: httpx.Client, n: int):
    computed = server.state()["computed_prefill_tokens"]
    with server.held(client, HOLD_S):
        # Every row is asked for while the scheduler stands still, so this one is queued behind them.
        bodies = [{"text": f"{i}", "rid": f"{i}", "sampling_params": greedy(40)} for i in range(MAX_RUNNING)]
        rest = [Stream(client, "/generate", body) for body in bodies]
        wait_until(lambda: all(is_taken(client, f"{i}") for i in range(MAX_RUNNING)), "all have arrived")
        body = {"text": "leaves " * 20, "sampling_params": greedy(LONG, n=n), "stream": True}
        server.raw_post("/generate", body).close()
    for stream in rest:
        stream.join()

    wait_until(lambda: is_idle(server), "the request has stopped")
    assert all(stream.last["meta_info"]["finish_reason"]["type"] == "length" for stream in rest)
    assert server.state()["computed_prefill_tokens"] - computed < 100


def test_clients_that_leave_at_the_last_chunk_or_while_retracted(server: Server, client: httpx.Client):
    def leave_at_the_end(i: int) -> None:
        with client.stream("POST", "/generate", json=BODIES["/generate"] | {"text": f"{i}", "stream": True}) as reply:
            for line in reply.iter_lines():
                if '"type":"length"' in line:
                    return

    def leave_in_between(i: int) -> None:
        # 16 of them want seven times the KV cache: some have been retracted when they leave.
        with client.stream("POST", "/generate", json=BODIES["/generate"] | {"text": f"{i}", "stream": True}) as reply:
            for number, line in enumerate(reply.iter_lines()):
                if number > 2 * (20 * i):
                    return
                assert '"error"' not in line

    before = server.state()["num_retracted"]
    each_at_once(leave_at_the_end, range(3))
    each_at_once(leave_in_between, range(16))

    wait_until(lambda: is_idle(server), "all have stopped")
    assert server.state()["num_retracted"] > before


def test_clients_in_a_hurry_leave_a_server_that_answers(server: Server):
    def hurry(i: int) -> int:
        with server.client(timeout=0.5) as client:
            try:
                return client.post("/generate", json={"text": f"{i}", "sampling_params": greedy(300)}).status_code
            except httpx.TimeoutException:
                return 0

    with server.client() as client, server.held(client, 1.5):
        statuses = each_at_once(hurry, range(200), workers=50)

    assert set(statuses) <= {0, 200, 503}
    assert statuses.count(0) > 0, "none was in a hurry"
    wait_until(lambda: is_idle(server), "those requests have stopped")


def test_a_client_process_that_is_killed_takes_its_requests_along(server: Server, client: httpx.Client):
    code = (
        "import json, socket, sys\n"
        "address, requests = json.loads(sys.stdin.readline())\n"
        "connections = [socket.create_connection(address) for _ in requests]\n"
        "[c.sendall(r.encode()) for c, r in zip(connections, requests)]\n"
        "print('sent', flush=True)\n"
        "sys.stdin.read()\n"
    )
    body = json.dumps(BODIES["/generate"])
    key = client.headers["authorization"]
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\nauthorization: {key}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n{body}"
    url = httpx.URL(server.url)
    made = server.state()["generation_tokens"]
    with (
        server.held(client, 1.5),
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(json.dumps([(url.host, url.port), [request] * 16]) + "\n")
        other.stdin.flush()
        assert other.stdout.readline() == "sent\n"
        other.send_signal(signal.SIGKILL)

    wait_until(lambda: is_idle(server), "its requests have stopped")
    assert server.state()["generation_tokens"] - made < 16 * LONG / 2


def test_an_abort_takes_its_exact_rid_and_may_be_repeated(server: Server, client: httpx.Client):
    def abort(rid: str) -> None:
        assert client.post("/abort_request", json={"rid": rid}).status_code == 200

    with server.held(client, HOLD_S):
        streams = {
            rid: Stream(client, "/generate", {"text": rid, "rid": rid, "sampling_params": greedy(40)})
            for rid in ("req-1", "req-10", "req")
        }
        abort("nobody")
        abort("req-")
        wait_until(lambda: all(is_taken(client, rid) for rid in streams), "all have arrived")
        abort("req-1")
        abort("req-1")
    for stream in streams.values():
        stream.join()

    reasons = {rid: stream.last["meta_info"]["finish_reason"]["type"] for rid, stream in streams.items()}
    assert reasons == {"req-1": "abort", "req-10": "length", "req": "length"}
    assert all(stream.payloads.count("[DONE]") == 1 for stream in streams.values())


def test_abort_all_ends_every_request_and_needs_the_admin_key(server: Server, client: httpx.Client):
    with server.held(client, HOLD_S):
        streams = [
            Stream(client, "/generate", BODIES["/generate"] | {"text": f"{i}", "rid": f"{i}"}) for i in range(32)
        ]
        wait_until(lambda: all(is_taken(client, f"{i}") for i in range(32)), "all have arrived")
        assert client.post("/abort_request", json={"abort_all": True}).status_code == 401
        assert server.admin.post("/abort_request", json={"abort_all": True}).status_code == 200
    for stream in streams:
        stream.join()
        assert stream.last["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_rid_is_taken_while_its_request_lives_and_free_afterwards(server: Server, client: httpx.Client):
    body = {"text": "a", "rid": "mine", "sampling_params": greedy(8)}
    with server.held(client, HOLD_S):
        first = Stream(client, "/generate", body)
        wait_until(lambda: is_taken(client, "mine"), "the first has arrived")
        assert client.post("/generate", json=body).status_code == 400
    first.join()
    assert first.last["meta_info"]["finish_reason"]["type"] == "length"
    assert client.post("/generate", json={"text": ["a", "b"], "rid": ["twice", "twice"]}).status_code == 400
    assert client.post("/generate", json=body).status_code == 200


def test_good_and_bad_requests_share_one_connection(server: Server):
    good = {"text": "a", "sampling_params": greedy(1)}
    table: list[tuple[int, dict[str, Any]]] = [
        (200, {"json": good}),
        (400, {"json": good | {"nonsense": 1}}),
        (400, {"content": b'{"text": ', "headers": {"content-type": "application/json"}}),
        (400, {"json": {"text": ""}}),
        (200, {"json": good | {"stream": True}}),
        (400, {"json": good | {"input_ids": [1]}}),
        (400, {"content": b"x", "headers": {"content-type": "text/plain"}}),
        (400, {"json": {"input_ids": [10**6]}}),
    ]
    with httpx.Client(
        base_url=server.url,
        headers={"authorization": f"Bearer {USER_KEY}"},
        limits=httpx.Limits(max_connections=1),
        timeout=60,
    ) as client:
        for i in range(200):
            status, request = table[i % len(table)]
            assert client.post("/generate", **request).status_code == status, request
