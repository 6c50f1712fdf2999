"""Starts a server for a measurement, in a process of its own, and stops it afterwards."""

import contextlib
import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from headrace.errors import ExecutionError


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server that is ready. process: its main process, whose children are its other parts."""

    port: int
    process: psutil.Process

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def own_server(model: str, options: Sequence[str] = ()) -> Iterator[OwnServer]:
    """Start a server on a free port, wait until it is ready, and end it afterwards. Raises ExecutionError if it ends before that."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = (sys.executable, "-m", "headrace.cli", "serve", model, "--port", str(port), "--log-level", "warning")
    server = subprocess.Popen([*command, *options])
    try:
        while not _is_ready(port):
            if server.poll() is not None:
                raise ExecutionError(f"the server ended with status {server.returncode} before it was ready")
            time.sleep(0.1)
        yield OwnServer(port, psutil.Process(server.pid))
    finally:
        server.terminate()
        server.wait()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
