"""One server that is compared: started for a class of precision, waited for, asked how busy it is, stopped.

Owns the process and its log file. Does not send workloads. Runs in the benchmark client's process; each `peer_*.py` beside this
file says how its server is started and can be run alone.
"""

import argparse
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, Self

import psutil
from greedy import ContinueGreedily

from headrace.errors import ConfigError

Precision = Literal["16", "8", "4"]
PRECISIONS: tuple[Precision, ...] = ("16", "8", "4")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PEERS_VENV = HERE / ".venv"
MODELS = PEERS_VENV / "models"
_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started and asked. name: server and format, as figures call it. needs: files that must be there first.

    ask_precision: what it computes in, by the names of Headrace's /server_info; nothing if it has that route.
    """

    name: str
    arguments: list[str]
    continue_greedily: ContinueGreedily
    needs: tuple[Path, ...] = ()
    ask_precision: Callable[[], dict[str, str]] = dict


CommandFor = Callable[[Precision, int], ServerCommand]


class ServerProcess:
    """A running server in a process group of its own; a context manager that ends the whole group."""

    def __init__(self, command: ServerCommand, port: int, log_file: Path) -> None:
        """Raises ConfigError when something that the server needs is missing."""
        for path in command.needs:
            if not path.exists():
                raise ConfigError(f"{command.name} needs {path}; run benchmarks/compare/setup first")
        self.name = command.name
        self.command = command
        self.url = f"http://127.0.0.1:{port}"
        self.log_file = log_file
        self.started_s = time.monotonic()
        self._port = port
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                command.arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def wait_until_ready(self, timeout_s: float = 300.0) -> float:
        """Seconds from start to the first 200 at /health. Raises ConfigError when it ends or takes longer."""
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise ConfigError(f"{self.name} ended with status {self._process.returncode}:\n{self.last_log_lines()}")
            if time.monotonic() - self.started_s > timeout_s:
                raise ConfigError(f"{self.name} is not ready after {timeout_s:.0f} s:\n{self.last_log_lines()}")
            time.sleep(0.1)
        return time.monotonic() - self.started_s

    def cpu_share(self, seconds: float = 1.0) -> float:
        """Processor time that the server and its children take now, in cores."""
        before = self._cpu_s()
        time.sleep(seconds)
        return (self._cpu_s() - before) / seconds

    def memory_mib(self) -> float:
        """Resident memory of the server and its children; pages that two of them share count once in each."""
        return sum(process.memory_info().rss for process in self._processes()) / 2**20

    def last_log_lines(self) -> str:
        """The end of what the server printed."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:])

    def stop(self) -> None:
        """Ask the group to end, and end it after ten seconds."""
        for number, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return sum(each.user + each.system for each in times)


def leave_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit in the main thread, so that the servers end before this process; further ones are ignored."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def num_cores() -> int:
    """Cores that this process, and so its servers, may run on."""
    return len(os.sched_getaffinity(0))


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_alone(command_for: CommandFor) -> None:
    """The command line of a `peer_*.py`: start the server, say when it is ready, stay until interrupted."""
    parser = argparse.ArgumentParser(description=command_for.__doc__)
    parser.add_argument("--class", dest="precision", choices=PRECISIONS, default="16", help="bits of a weight")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    command = command_for(options.precision, options.port)
    log_file = Path(tempfile.gettempdir(), f"{Path(command.arguments[0]).name}-{options.port}.log")
    leave_on_sigterm()
    with ServerProcess(command, options.port, log_file) as server:
        ready_s = server.wait_until_ready()
        # Blocked, not handled: also where the shell that started this ignores interrupts.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        print(f"{server.name} at {server.url}, ready after {ready_s:.1f} s; log in {server.log_file}", flush=True)
        print(f"ends on {signal.sigwait({signal.SIGINT, signal.SIGTERM}).name}", flush=True)
