"""A real server in a process of its own, and ways to talk to it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

_URL = re.compile(r"^\s+URL\s+(http://\S+)$")


@dataclass
class ServerProcess:
    """The server's address, its main process, and what it has written to stderr. exit_code: the one that it must leave with."""

    url: str
    log: list[str] = field(default_factory=list)
    pid: int = 0
    exit_code: int = 0

    def kill(self) -> None:
        """End the main process as `kill -9` does."""
        self.exit_code = -signal.SIGKILL
        os.kill(self.pid, signal.SIGKILL)

    def get(self, path: str) -> Any:
        """JSON of a GET that succeeds."""
        return httpx.get(self.url + path, timeout=30).raise_for_status().json()

    def post(self, path: str, body: object) -> Any:
        """JSON of a POST that succeeds."""
        return httpx.post(self.url + path, json=body, timeout=60).raise_for_status().json()

    def stream(self, path: str, body: dict[str, Any]) -> bytes:
        """Everything that a streamed reply says."""
        with httpx.stream("POST", self.url + path, json=body | {"stream": True}, timeout=60) as reply:
            assert reply.status_code == 200, reply.read()
            return b"".join(reply.iter_raw())

    def state(self) -> dict[str, Any]:
        """Counters and pool accounting of the scheduler."""
        state: dict[str, Any] = self.get("/internal_state")
        return state

    def wait_until_idle(self) -> dict[str, Any]:
        """The state when nothing runs or waits; every look asks the scheduler. Fails after many."""
        for _ in range(500):
            state = self.state()
            if state["num_running"] == 0 and state["num_waiting"] == 0 and state["num_in_flight_steps"] == 0:
                return state
        raise AssertionError(f"still busy: {state}")

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name without labels, those of one name added up."""
        values: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if not line.startswith("#"):
                name = re.split(r"[{ ]", line, maxsplit=1)[0]
                values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return values


@contextmanager
def serving(model: str, *options: str, headrace: Path | None = None) -> Iterator[ServerProcess]:
    """`headrace serve model --port 0 options`, until the block ends; then it must leave with code 0, unless it was killed.

    headrace: the command of another environment, which sees nothing of this checkout.
    """
    here = Path(__file__).parent
    program = [sys.executable, "-m", "headrace.cli"] if headrace is None else [str(headrace)]
    command = [*program, "serve", model, "--port", "0", *options]
    paths = [str(here), str(here.parent.parent / "src"), os.environ.get("PYTHONPATH", "")] if headrace is None else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        server = ServerProcess("", pid=process.pid)
        try:
            for line in process.stderr:
                server.log.append(line)
                if found := _URL.match(line):
                    server.url = found[1]
                    break
            assert server.url, f"the server did not start:\n{''.join(server.log)}"
            drain = threading.Thread(target=server.log.extend, args=(process.stderr,), daemon=True)
            drain.start()
            yield server
        finally:
            process.terminate()
            code = process.wait(timeout=60)
            if server.url:
                drain.join()
    assert code == server.exit_code, f"exit code {code}:\n{''.join(server.log)}"


def events(raw: bytes) -> list[dict[str, Any]]:
    """The objects of a stream, whose framing must be exactly `data: {...}` and empty lines, ended by one `[DONE]`."""
    frames = [frame for frame in raw.decode().split("\n\n") if not frame.startswith(": ")]  # it has waited
    assert frames[-1] == "", raw[-200:]
    assert frames[-2] == "data: [DONE]", raw[-200:]
    assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames[:-2]), raw[:500]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
