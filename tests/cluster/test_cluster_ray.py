"""`headrace serve --ray` on two Ray nodes of this machine. Skipped without Ray: `pip install 'headrace[ray]'` where you want these tests."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import httpx
import psutil
import pytest
from server_process import events

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

        os.kill(own.pop().pid, signal.SIGKILL)
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
