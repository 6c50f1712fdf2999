"""Clients that leave, dawdle, flood or do not read."""

import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from fake_frontend import MODEL, Running, running_server

from headrace.server import listener
from headrace.server.body import SMALL_BODY_BYTES
from headrace.turns import Beginnings

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/generate": {"text": "hi"},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/chat/completions": CHAT | {"n": 3},
}


@contextmanager
def raw(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=20) as sock:
        yield sock


def head(path: str, length: int, extra: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n" % (
        path.encode(),
        length,
        extra,
    )


def post(path: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    return head(path, len(content)) + content


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_reply(sock: socket.socket) -> bytes:
    """One reply with a length: head and body, which may come apart."""
    reply = b""
    while b"\r\n\r\n" not in reply:
        reply += sock.recv(1)
    length = next(line for line in reply.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    missing = int(length.split(b":")[1])
    while missing:
        part = sock.recv(missing)
        reply += part
        missing -= len(part)
    return reply


def read_until_silence(sock: socket.socket) -> bytes:
    """Everything until the socket's timeout; fails when the server closes."""
    parts = []
    try:
        while part := sock.recv(65536):
            parts.append(part)
    except TimeoutError:
        return b"".join(parts)
    raise AssertionError(f"the server closed the connection: {b''.join(parts)!r}")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(server: Running, path: str, stream: bool):
    server.frontend.script.hold_at = 2
    with raw(server) as sock:
        sock.sendall(post(path, BODIES[path] | {"stream": stream}))
        assert server.frontend.started.wait(10)
        assert not server.frontend.closed_early.is_set()
    assert server.frontend.closed_early.wait(10)
    assert server.frontend.num_active == 0
    assert httpx.get(server.url + "/ping").status_code == 200


def test_a_client_that_stays_is_not_aborted(server: Running):
    with raw(server) as sock:
        for _ in range(3):
            sock.sendall(post("/generate", BODIES["/generate"]))
            assert read_reply(sock).startswith(b"HTTP/1.1 200")
    assert not server.frontend.closed_early.is_set()


def test_good_and_bad_requests_share_a_connection(client: httpx.Client):
    for _ in range(100):
        assert (
            client.post("/generate", json={"text": "hi", "sampling_params": {"max_new_tokens": 1}}).status_code == 200
        )
        assert client.post("/generate", json={"text": 5}).status_code == 400
        assert client.post("/generate", content=b"{", headers={"content-type": "application/json"}).status_code == 400


def test_pipelined_requests_are_answered_in_order(server: Running):
    with raw(server) as sock:
        sock.sendall(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\nGET /nope HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        answer = read_all(sock)
    assert answer.index(b"200 OK") < answer.index(b"404 Not Found")


def test_bodies_beyond_the_limit_are_refused():
    with running_server(max_body_bytes=1000) as server:
        for content in (b"x" * 1001, iter([b"x" * 600] * 3)):
            reply = httpx.post(server.url + "/generate", content=content, headers={"content-type": "application/json"})
            assert reply.status_code == 413
            assert reply.json()["error"]["code"] == "body_too_large"
        with raw(server) as sock:
            # Refused by what it declares: nothing of the body is waited for.
            sock.sendall(head("/generate", 10**12))
            assert sock.recv(65536).startswith(b"HTTP/1.1 413")
        with raw(server) as sock:
            sock.sendall(head("/generate", 10**12, b"expect: 100-continue\r\n"))
            assert sock.recv(65536).startswith(b"HTTP/1.1 413")
        body = json.dumps({"text": "x" * 400, "sampling_params": {"max_new_tokens": 1}})
        assert (
            httpx.post(server.url + "/generate", content=body, headers={"content-type": "application/json"}).status_code
            == 200
        )


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\n", b"\r\n\r\n"])
def test_a_request_that_does_not_arrive_is_answered_and_closed(
    server: Running, sent: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(listener, "HEADER_TIMEOUT_S", 0.1)
    with raw(server) as sock:
        sock.sendall(sent)
        assert read_all(sock).startswith(b"HTTP/1.1 408")


def test_the_time_for_headers_counts_on_kept_connections_too(server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "HEADER_TIMEOUT_S", 0.1)
    with raw(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_reply(sock).startswith(b"HTTP/1.1 200")
        sock.sendall(b"GET /hea")
        assert read_all(sock).startswith(b"HTTP/1.1 408")


def test_a_body_that_does_not_arrive_is_answered_and_closed(server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "BODY_TIMEOUT_S", 0.1)
    for sent in (
        head("/generate", 100) + b'{"text": ',
        b'POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"tex\r\n',
    ):
        with raw(server) as sock:
            sock.sendall(sent)
            answer = read_all(sock)
            assert answer.startswith(b"HTTP/1.1 408")
            assert b'"error"' in answer
    assert not server.frontend.calls


def test_a_slow_reply_is_no_slow_request(server: Running, monkeypatch: pytest.MonkeyPatch):
    """The times are for requests to arrive: an answer, and requests queued behind it, may take longer."""
    for name in ("HEADER_TIMEOUT_S", "BODY_TIMEOUT_S"):
        monkeypatch.setattr(listener, name, 0.5)
    server.frontend.script.hold_at = 1
    with raw(server) as sock:
        sock.sendall(post("/generate", BODIES["/generate"] | {"stream": True}))
        first = sock.recv(65536)
        assert first.startswith(b"HTTP/1.1 200")
        sock.sendall(head("/generate", 1000))  # half a request behind the one that is being answered
        sock.settimeout(1.5)
        assert b"HTTP/1.1 408" not in read_until_silence(sock)
    assert server.frontend.closed_early.wait(10)


@pytest.mark.parametrize(
    "sent, status",
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: -5\r\n\r\n", 400),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 100_000, 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 100_000 + b"\r\n\r\n", 431),
    ],
)
def test_what_is_no_http_or_too_much_of_it_is_refused(server: Running, sent: bytes, status: int):
    with raw(server) as sock:
        sock.sendall(sent)
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        assert b"\r\nx-request-id: " in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert httpx.get(server.url + "/ping").status_code == 200


def test_connections_beyond_a_share_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """One address, or one key, has 16 of 17. What belongs to a key is none of its address's, so those of other keys on a machine have room."""
    monkeypatch.setattr(listener, "max_connections", lambda: 34)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": name, "key": f"secret-{name}"} for name in "ab"]}))
    with running_server(api_key_file=str(keys)) as running, ExitStack() as stack:

        def ask(key: str) -> bytes:
            sock = stack.enter_context(raw(running))
            sock.sendall(
                b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer secret-%b\r\n\r\n" % key.encode()
            )
            return read_reply(sock)

        for _ in range(32):
            assert ask("a").startswith(b"HTTP/1.1 200")
        refused = ask("a")
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1\r\n" in refused
        assert b"connection: close\r\n" in refused
        assert b"overloaded_error" in refused
        assert ask("b").startswith(b"HTTP/1.1 200")
        with raw(running) as unknown:
            refused = read_all(unknown)
            assert refused.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1\r\n" in refused


def test_a_body_that_trickles_is_not_kept(server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "BODY_WINDOW_S", 0.05)
    with raw(server) as sock:
        sock.sendall(head("/generate", 1 << 20) + b" " * (SMALL_BODY_BYTES + 1))
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"slower than 4 KiB a second" in answer
    assert not server.frontend.calls


def test_a_body_that_stalls_once_is_read(server: Running, monkeypatch: pytest.MonkeyPatch):
    check, checked = listener.LimitedProtocol._check_rate, threading.Event()

    def first(protocol: listener.LimitedProtocol) -> None:
        monkeypatch.setattr(listener, "BODY_WINDOW_S", 30.0)  # of the next
        check(protocol)
        checked.set()

    monkeypatch.setattr(listener, "BODY_WINDOW_S", 0.05)
    monkeypatch.setattr(listener.LimitedProtocol, "_check_rate", first)
    with raw(server) as sock:
        content = json.dumps(BODIES["/generate"]).encode()
        sock.sendall(head("/generate", 1 << 20) + b" " * (SMALL_BODY_BYTES + 1))
        assert checked.wait(20)
        sock.sendall(content.rjust((1 << 20) - SMALL_BODY_BYTES - 1))
        assert read_reply(sock).startswith(b"HTTP/1.1 200")


def test_a_request_that_begins_after_its_connection_was_lost_takes_no_place(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    lose, held = listener.LimitedProtocol.connection_lost, queue.SimpleQueue[dict[str, int]]()

    def then_begin(protocol: listener.LimitedProtocol, exc: Exception | None) -> None:
        lose(protocol, exc)
        protocol.belong_to("late", {})
        held.put(dict(protocol._shares._own))

    monkeypatch.setattr(listener.LimitedProtocol, "connection_lost", then_begin)
    with raw(server):
        pass
    assert "late" not in held.get(timeout=20)


def test_a_client_that_never_reads_is_cut_off(server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "WRITE_STALL_S", 0.1)
    server.frontend.script.text = "x" * 400
    server.frontend.script.padding_bytes = 200_000
    with raw(server) as sock:
        body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 400}}
        sock.sendall(post("/generate", body))
        assert server.frontend.closed_early.wait(20)
    assert server.frontend.num_active == 0


def test_a_slow_reader_gets_everything(server: Running, monkeypatch: pytest.MonkeyPatch):
    server.frontend.script.text = "x" * 40
    server.frontend.script.padding_bytes = 200_000
    with raw(server) as sock:
        body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 400}}
        content = json.dumps(body).encode()
        sock.sendall(head("/generate", len(content), b"connection: close\r\n") + content)
        answer = read_all(sock)
    assert answer.count(b"data: [DONE]") == 1
    assert len(answer) > 8_000_000
    assert not server.frontend.closed_early.is_set()


def test_requests_begin_in_turns(server: Running, monkeypatch: pytest.MonkeyPatch):
    """Probes have a turn of their own."""
    held: queue.Queue[tuple[Callable[[], None], Callable[[], object]]] = queue.Queue()
    monkeypatch.setattr(Beginnings, "add", lambda self, begin, flow: held.put((begin, flow)))
    flows = []
    for path in (b"/v1/models", b"/ping"):
        with raw(server) as sock:
            sock.sendall(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path)
            _, flow = held.get(timeout=20)
            flows.append(flow())
    assert flows == [("@127.0.0.1", False), ("@127.0.0.1", True)]
