"""Runs `headrace serve` as a child process: its command line, its port, waiting until it is ready, and stopping it."""

import atexit
import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from dataclasses import fields
from typing import Any

from headrace.api.http_client import HttpClient, Refusal
from headrace.config.server_args import ServerArgs
from headrace.config.settings import variable
from headrace.errors import ConfigError, ExecutionError
from headrace.processes import lifeline

FIRST_PORT, LAST_PORT = 10000, 40000
READY_POLL_S = 0.1
STOP_TIMEOUT_S = 10.0
KEY_VARIABLES = {"api_key": "HEADRACE_API_KEY", "admin_api_key": "HEADRACE_ADMIN_API_KEY"}
"""Keys are passed in the environment, since every user of the machine can read the command line."""


class ServerProcess:
    """A started server. It ends at `stop`, at exit, and when this process is killed.

    options: fields of `ServerArgs`; default for `port`: a free one. Raises ConfigError.
    url: of the server. key: to authorize with, None if it needs no key.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        if options.get("ssl_certfile") is not None:
            raise ConfigError(
                "a Runtime talks to its own server without TLS: leave ssl_certfile out, or start `headrace serve`"
            )
        host = options.get("host", "127.0.0.1")
        port = options.get("port", 0) or free_port(host)
        self.url = f"http://{host}:{port}"
        self.key: str | None = options.get("admin_api_key") or options.get("api_key") or None
        command = [
            sys.executable,
            "-m",
            "headrace.cli",
            "serve",
            *command_line({**options, "host": host, "port": port}),
        ]
        their_end, self._lifeline_fd = os.pipe()
        variables = {**_environment(options), lifeline.VARIABLE: f"{their_end}:{os.getpid()}"}
        try:
            self._popen = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, pass_fds=(their_end,))
        except BaseException:
            os.close(self._lifeline_fd)
            raise
        finally:
            os.close(their_end)
        self._lock = threading.Lock()
        self._is_stopped = False
        self._owner_pid = os.getpid()
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        return self._popen.poll()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it is ready. Raises ExecutionError if it exits first, or after `timeout_s` seconds."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            code = self._popen.poll()
            if code is not None:
                raise ExecutionError(f"the server exited during start-up (exit code {code}); see its log")
            # It refuses while it loads; before, nobody listens.
            with contextlib.suppress(Refusal, OSError), HttpClient(self.url).open("/ready", timeout_s=2.0):
                return
            time.sleep(READY_POLL_S)
        raise ExecutionError(f"the server was not ready within {timeout_s:g} s")

    def stop(self) -> None:
        """Stop the server: gracefully, then by force. Idempotent. Does nothing in the child of a fork, since the server belongs to the parent."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            atexit.unregister(self.stop)
            self._popen.terminate()
            try:
                self._popen.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
            os.close(self._lifeline_fd)


def free_port(host: str = "127.0.0.1") -> int:
    """A free port from 10000 to 40000. Raises ConfigError if there is none."""
    for port in random.sample(range(FIRST_PORT, LAST_PORT + 1), 200):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no free port between {FIRST_PORT} and {LAST_PORT} on {host}")


def command_line(options: dict[str, Any]) -> list[str]:
    """Options of `headrace serve` for fields of `ServerArgs`. Keys are left out. Raises ConfigError for an unknown field."""
    by_name = {option.name: option for option in fields(ServerArgs)}
    words = []
    for name, value in options.items():
        if name not in by_name:
            raise ConfigError(f"unknown option: {name}")
        if name in KEY_VARIABLES or value is None:
            continue
        flag = name.replace("_", "-")
        if not isinstance(value, bool):
            words.append(f"--{flag}={value}")
        elif value != by_name[name].default:
            words.append(f"--{flag}" if value else f"--no-{flag}")
    return words


def _environment(options: dict[str, Any]) -> dict[str, str]:
    """Our environment without its options, which are meant for other servers (keys would lock us out of this one), with the keys of `options`."""
    theirs = {variable(f.name) for f in fields(ServerArgs)}
    own = {name: value for name, value in os.environ.items() if name not in theirs}
    given = {variable: options[name] for name, variable in KEY_VARIABLES.items() if options.get(name) is not None}
    return {**own, **given}
