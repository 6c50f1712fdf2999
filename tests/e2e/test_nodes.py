"""One model on two "hosts", both on this machine: the text of one host, and what happens when a rank or the link between them is lost."""

import re
import socket
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
from engines import running_engine
from server_process import ServerProcess, serving

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))

from cut_link import Link

LIMIT_S = 60.0
LONG: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 900, "ignore_eos": True}
OPTIONS = ("--nnodes", "2", "--max-total-tokens", "2048")
SHARDS, STAGES = ("--tp-size", "2"), ("--pp-size", "2")


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def node_0(model: str, port: int, *options: str) -> Any:
    return serving(model, *OPTIONS, *options, "--node-rank", "0", "--dist-init-addr", f"127.0.0.1:{port}")


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


@pytest.mark.parametrize(
    ("options", "one_host"),
    [(SHARDS, {"tp_size": 2}), (SHARDS + STAGES, {"tp_size": 2})],
    ids=["shards", "stages of shards"],
)
def test_two_nodes_give_the_text_of_one_until_their_link_is_cut_and_both_end_with_an_error(
    options: tuple[str, ...], one_host: dict[str, int], tiny_model: str
):
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    prompts = [[5 + i] * (3 + 20 * i) for i in range(4)]
    with running_engine(tiny_model, single_process=False, **one_host) as engine:
        alone = [one["output_ids"] for one in engine.generate(input_ids=prompts, sampling_params=sampling)]
    port = free_port()
    link = Link(port)
    try:
        with other_node(tiny_model, link.port, *options) as node, node_0(tiny_model, port, *options) as server:
            together = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
            assert [one["output_ids"] for one in together] == alone
            assert server.post("/update_weights_from_disk", {"model_path": tiny_model})["success"]
            again = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
            assert [one["output_ids"] for one in again] == alone
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


@pytest.mark.parametrize("options", [SHARDS, STAGES], ids=["shards", "stages"])
def test_two_nodes_measure_a_kv_cache_of_integers_and_end_well_together(options: tuple[str, ...], tiny_model: str):
    port = free_port()
    options += ("--quantization", "int8")
    with other_node(tiny_model, port, *options) as node:
        with node_0(tiny_model, port, *options) as server:
            info = httpx.get(f"{server.url}/server_info", timeout=30).json()
            assert (info["kv_cache_dtype"], info["kv_cache_added_error"] <= 0.02) == ("int8", True)
        assert node.process.wait(LIMIT_S) == 0, node.log
