"""One model on two "hosts", both on this machine: the text of one host, and what happens when a rank or the link between them is lost."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engines import free_port, running_engine
from server_process import ServerProcess, serving

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))

from cut_link import Link

LIMIT_S = 60.0
LONG: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 900, "ignore_eos": True}
OPTIONS = ("--nnodes", "2", "--max-total-tokens", "2048", "--quantization", "int8")
SHARDS, STAGES = ("--tp-size", "2"), ("--pp-size", "2")
ASKED: dict[str, Any] = {
    "input_ids": [[5 + i] * (3 + 20 * i) for i in range(4)],
    "sampling_params": {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True},
}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DIST_SECRET", "a secret of these tests")


@dataclass
class OtherNode:
    """The process of node 1, which serves nothing but /health. url: known once it has said so."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    url: str = ""
    told: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "it answers /health at " in line:
                self.url = line.partition("it answers /health at ")[2].partition(",")[0]
                self.told.set()

    def health(self) -> int:
        assert self.told.wait(LIMIT_S), self.log
        return httpx.get(f"{self.url}/health", timeout=30).status_code


@contextmanager
def other_node(model: str, port: int, *options: str) -> Iterator[OtherNode]:
    """Node 1 of two, which looks for node 0 at this port."""
    command = [sys.executable, "-m", "headrace.cli", "serve", model, "--port", "0", *OPTIONS, *options]
    command += ["--node-rank", "1", "--dist-init-addr", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        node = OtherNode(process)
        reader = threading.Thread(target=node.read, daemon=True)
        reader.start()
        try:
            yield node
        finally:
            process.kill() if process.poll() is None else None
            process.wait(LIMIT_S)
            reader.join(LIMIT_S)


def node_0(model: str, port: int, *options: str) -> Any:
    return serving(model, *OPTIONS, *options, "--node-rank", "0", "--dist-init-addr", f"127.0.0.1:{port}")


@pytest.fixture(scope="module")
def alone(tiny_model: str) -> list[list[int]]:
    """What two shards on one host answer."""
    with running_engine(tiny_model, single_process=False, tp_size=2, quantization="int8") as engine:
        return [one["output_ids"] for one in engine.generate(**ASKED)]


def answers(server: ServerProcess) -> list[list[int]]:
    return [one["output_ids"] for one in server.post("/generate", ASKED)]


def check_kv_cache(server: ServerProcess) -> None:
    """It has integers, whose error all ranks have measured together."""
    info = server.get("/server_info")
    assert (info["kv_cache_dtype"], info["kv_cache_added_error"] <= 0.02) == ("int8", True)


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, and leave its exit code to its parent."""
    process = psutil.Process(pid)
    end_s = time.monotonic() + LIMIT_S
    while process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s
        time.sleep(0.02)


def stream_until(server: ServerProcess, begun: Callable[[], None]) -> str:
    """What a stream says until it ends. begun: called after its first part."""
    text = ""
    with httpx.stream(
        "POST", f"{server.url}/generate", json={"text": "Hello", "sampling_params": LONG, "stream": True}, timeout=60
    ) as reply:
        for part in reply.iter_text():
            if not text:
                begun()
            text += part
    return text


def test_two_nodes_give_the_text_of_one_until_their_link_is_cut_and_both_end_with_an_error(
    tiny_model: str, alone: list[list[int]]
):
    """Two stages of two shards, so that a node that ends has another process to end."""
    port = free_port()
    link = Link(port)
    options = SHARDS + STAGES
    try:
        with other_node(tiny_model, link.port, *options) as node, node_0(tiny_model, port, *options) as server:
            check_kv_cache(server)
            assert answers(server) == alone
            assert server.post("/update_weights_from_disk", {"model_path": tiny_model})["success"]
            assert answers(server) == alone
            assert node.health() == 200
            assert httpx.get(f"{node.url}/v1/models", timeout=30).status_code == 404
            reply = httpx.post(f"{server.url}/get_weights_by_name", json={"name": "model.norm.weight"}, timeout=30)
            assert reply.status_code == 400
            assert "--nnodes" in reply.text

            server.exit_code = 1
            assert "the scheduler process has ended" in stream_until(server, link.cut)
            assert node.process.wait(LIMIT_S) == 1
            wait_for_end(server.pid)
        assert any(re.search("rank [123] on .* is lost", line) for line in server.log), server.log
    finally:
        link.close()


def test_the_shards_of_a_layer_on_two_nodes_give_the_text_of_one_and_both_end_well_together(
    tiny_model: str, alone: list[list[int]]
):
    port = free_port()
    with other_node(tiny_model, port, *SHARDS) as node:
        with node_0(tiny_model, port, *SHARDS) as server:
            check_kv_cache(server)
            assert answers(server) == alone
        assert node.process.wait(LIMIT_S) == 0, node.log
