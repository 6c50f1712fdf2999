"""A limit of open files that is too low is one clear line, before anything is loaded."""

import resource
import subprocess
import sys

import pytest

from headrace.config.machine import check_open_files
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError

ENGINE = """
from headrace import Engine
from headrace.errors import ConfigError
try:
    Engine(model_path="smollm2")
except ConfigError as error:
    print(error.message)
"""


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    """With 24 files."""
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)),
    )


def test_a_server_that_may_open_too_few_files_says_so_in_one_line():
    done = run("-m", "headrace.cli", "serve", "smollm2", "--port", "0")

    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert "24 files open" in lines[0]
    assert "ulimit -n 256" in lines[0]


def test_an_engine_that_may_open_too_few_files_says_so():
    done = run("-c", ENGINE)

    assert done.stderr == ""
    assert "24 files open and an engine needs 64: raise the limit with ulimit -n 64" in done.stdout


@pytest.mark.parametrize(
    "limit, replicas, fits", [(64, 1, True), (63, 1, False), (96, 3, True), (95, 3, False), (-1, 8, True)]
)
def test_each_replica_needs_its_own(monkeypatch: pytest.MonkeyPatch, limit: int, replicas: int, fits: bool):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    args = ServerArgs(model_path="x", dp_size=replicas)
    if fits:
        check_open_files(args)
    else:
        with pytest.raises(ConfigError, match="files open"):
            check_open_files(args)
