"""Servers that are measured: started as a process, waited for, asked how busy they are, and ended with all that they started; streams of them."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

from headrace.benchmark.http_stream import StreamReply, post
from headrace.errors import ConfigError

_LOG_LINES = 20
_PATIENCE_S = 10.0


class ServerProcess:
    """A running server; a context manager that ends it. process: its main process, whose children are its other parts."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        port: int,
        log_file: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it. log_file: gets what it prints; None = where this process prints. environment: variables beside those of this process."""
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log_file = log_file
        self.started_s = time.monotonic()
        with log_file.open("wb") if log_file is not None else contextlib.nullcontext() as log:
            self._popen = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=None if log is None else subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        self.process = psutil.Process(self._popen.pid)

    def wait_until_ready(self, path: str = "/health", timeout_s: float = 300.0) -> float:
        """Seconds from start to the first 200 at `path`. Raises ConfigError when it ends or takes longer."""
        while not self._answers(path):
            if self._popen.poll() is not None:
                raise ConfigError(f"{self.name} ended with status {self._popen.returncode}:\n{self._last_log_lines()}")
            if time.monotonic() - self.started_s > timeout_s:
                raise ConfigError(f"{self.name} is not ready after {timeout_s:.0f} s:\n{self._last_log_lines()}")
            time.sleep(0.1)
        return time.monotonic() - self.started_s

    def part(self, name: str) -> psutil.Process:
        """A child of Headrace's main process: scheduler or detokenizer."""
        return next(child for child in self.process.children() if name in child.cmdline())

    def cpu_share(self, seconds: float = 1.0) -> float:
        """Processor time that the server and its children take now, in cores."""
        before = self._cpu_s()
        time.sleep(seconds)
        return (self._cpu_s() - before) / seconds

    def memory_mib(self) -> float:
        """Resident memory of the server and its children; pages that two of them share count once in each."""
        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / 2**20

    def stop(self) -> None:
        """Ask it to end, and end what is left of it after ten seconds."""
        try:
            started = self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        self._popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_PATIENCE_S)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.kill()
        self._popen.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _last_log_lines(self) -> str:
        if self.log_file is None:
            return "it has said why above"
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:])

    def _answers(self, path: str) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return sum(each.user + each.system for each in times)


@contextlib.contextmanager
def own_server(
    model: str, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Headrace on a free port, ready. Raises ConfigError if it ends before that."""
    port = free_port()
    command = [sys.executable, "-m", "headrace.cli", "serve", model, "--port", str(port), "--log-level", "warning"]
    with ServerProcess("headrace serve", [*command, *options], port, environment=environment) as server:
        server.wait_until_ready("/ready", timeout_s=1800.0)
        yield server


async def arrivals(url: str, text: str, num_tokens: int) -> list[float]:
    """When each token of a greedy stream came. The reply is looked at when it has ended, so that the client takes little time."""
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"text": text, "stream": True, "sampling_params": sampling}).encode()
    reply = await post(f"{url}/generate", body, {"Content-Type": "application/json"}, 900)
    if reply.status != 200 or reply.error is not None:
        raise ConfigError(f"{url} answered {reply.status}: {reply.error or reply.body[:200]!r}")
    return token_times(reply)


def token_times(reply: StreamReply) -> list[float]:
    """When each token of a stream came."""
    return [now_s for now_s, piece in reply.pieces for _ in range(piece.count(b"data: {"))]


def posted(url: str, body: Mapping[str, Any]) -> Any:
    """The JSON that is the answer to a POST of JSON. Raises HTTPError for another status than 200."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def greedy(url: str, prompt: str | Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Headrace's reply to a request for exactly so many greedy tokens after a text or token ids."""
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, "repetition_penalty": 1.0, "ignore_eos": True}
    given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return dict(posted(f"{url}/generate", {**given, "sampling_params": sampling}))


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def leave_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit in the main thread, so that the servers end before this process; further ones are ignored."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
