"""`headrace serve --ray` on two Ray nodes of this machine. Skipped without Ray: `pip install 'headrace[ray]'` where you want these tests."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import httpx
import psutil
import pytest
from server_process import events

from headrace.cluster.ray_proxy import LOST

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

LIMIT_S = 120.0
KEY = {"authorization": "Bearer sesame"}
BODY = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}


class Served(NamedTuple):
    """The server's address and its main process."""

    url: str
    process: subprocess.Popen[str]
    log: IO[str]

    def text(self) -> str:
        """A completion."""
        reply = httpx.post(self.url + "/v1/completions", json=BODY, headers=KEY, timeout=60)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    def written(self) -> str:
        """What its processes have logged so far."""
        self.log.seek(0)
        return self.log.read()


def wait_for(server: Served, pattern: str) -> None:
    """Until the log has the pattern."""
    end_s = time.monotonic() + LIMIT_S
    while not re.search(pattern, server.written()):
        assert time.monotonic() < end_s, server.written()
        assert server.process.poll() is None, server.written()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    program = [sys.executable, str(Path(__file__).parent / "two_ray_nodes.py")]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield next(line.split()[1] for line in process.stdout if line.startswith("address "))
        process.stdin.close()


@contextmanager
def on_ray(address: str, *options: str) -> Iterator[Served]:
    """`headrace serve smollm2 --ray`, with two replicas of one CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "headrace.cli", "serve", "smollm2", "--ray", "--ray-address", address]
    command += ["--port", str(port), "--ray-num-cpus", "1", "--max-total-tokens", "2048", *options]
    environment = os.environ | {"RAY_AUTH_MODE": "token", "HEADRACE_API_KEY": "sesame"}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True
        ) as process,
    ):
        served = Served(f"http://127.0.0.1:{port}", process, log)
        try:
            wait_for(served, "Headrace serves smollm2 on Ray")
            yield served
        finally:
            process.terminate()
            assert process.wait(timeout=LIMIT_S) == 0, served.written()


def replicas() -> list[psutil.Process]:
    """The actors' processes."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if "ray::ServeReplica:headrace:EngineReplica" in "".join(each.info["cmdline"] or ())
    ]


MESSAGES = [{"role": "user", "content": "Tell me a story"}]
ANSWERED = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True},
    "/v1/messages": {"model": "", "messages": MESSAGES, "max_tokens": 400},
    "/v1/responses": {"input": "Tell me a story", "max_output_tokens": 400, "ignore_eos": True},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 400}},
}


def ended(server: Served, path: str, stream: bool, begun: threading.Barrier) -> bool:
    """Whether a long request ends with an error of its API; if not, it is complete. begun: passed once a stream has begun, or the request is sent."""
    body = ANSWERED[path] | {"stream": stream}
    if not stream:
        begun.wait()
        reply = httpx.post(server.url + path, json=body, headers=KEY, timeout=LIMIT_S)
        assert reply.headers["content-type"] == "application/json", reply.text
        assert (reply.status_code == 200) == (LOST not in reply.text)
        return reply.status_code != 200
    with httpx.stream("POST", server.url + path, json=body, headers=KEY, timeout=LIMIT_S) as reply:
        assert reply.status_code == 200
        pieces = reply.iter_text()
        text = next(pieces)
        begun.wait()
        text += "".join(pieces)
    whole = {"/v1/messages": "message_stop", "/v1/responses": "response.incomplete", "/api/chat": '"done":true'}
    failed = {"/v1/messages": "event: error", "/v1/responses": "response.failed", "/api/chat": '{"error":'}
    is_lost = LOST in text
    last = text.strip().splitlines()[-2:] if path != "/api/chat" else text.strip().splitlines()[-1:]
    ends = (failed if is_lost else whole).get(path, "data: [DONE]")
    assert ends in "\n".join(last) or ends in text.strip()[-400:], text[-1000:]
    return is_lost


def test_replicas_on_two_nodes_answer_and_one_that_is_killed_is_replaced(address):
    before = set(replicas())
    options = ("--ray-min-replicas", "2", "--ray-max-replicas", "2", "--ray-placement", "strict_spread")
    with on_ray(address, *options) as server:
        own = set(replicas()) - before
        assert len(own) == 2
        assert httpx.get(server.url + "/health", timeout=60).json() == {"status": "ok"}
        assert httpx.post(server.url + "/v1/completions", json=BODY, timeout=60).status_code == 401
        refused = httpx.post(server.url + "/flush_cache", headers=KEY, timeout=60).json()["error"]
        assert refused["code"] == "unsupported_with_ray"

        text = server.text()
        with httpx.stream(
            "POST", server.url + "/v1/completions", json=BODY | {"stream": True}, headers=KEY, timeout=60
        ) as reply:
            chunks = events(b"".join(reply.iter_raw()))
        assert len(chunks) > 1
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text

        asked = [(path, stream) for path in ANSWERED for stream in (True, False)] * 2
        with ThreadPoolExecutor(len(asked)) as threads:
            begun = threading.Barrier(len(asked) + 1, timeout=LIMIT_S)
            running = [threads.submit(ended, server, path, stream, begun) for path, stream in asked]
            begun.wait()
            os.kill(own.pop().pid, signal.SIGKILL)
            assert True in [one.result() for one in running], "some were of the one that was killed"
        end_s = time.monotonic() + LIMIT_S
        while len(set(replicas()) - before - own) < 1:
            assert time.monotonic() < end_s, server.written()
            assert server.text() == text, "the other one goes on"
    assert set(replicas()) == before


def test_options_that_no_replica_can_start_with_end_the_start_with_their_reason(address):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "headrace.cli", "serve", "smollm2", "--ray", "--ray-address", address]
    done = subprocess.run(
        [*command, "--port", str(port), "--ray-num-cpus", "1", "--context-length", "9999999"],
        env=os.environ | {"RAY_AUTH_MODE": "token"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "no replica started on Ray: --context-length 9999999 is longer than" in last
