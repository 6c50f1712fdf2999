"""The scheduler of `headrace serve` begins before the options are read, and is taken only for what it may become."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config.server_args import ServerArgs
from headrace.errors import ExecutionError
from headrace.messages.channel import Ports
from headrace.processes import early
from headrace.processes.child import ChildProcess

_WAITS = (sys.executable, "-c", "import sys; sys.stdin.read()")
"""A stand-in that ends when its parent has."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[early.Started]:
    monkeypatch.setattr(early, "PROGRAM", _WAITS)
    monkeypatch.setattr("headrace.processes.child.PROGRAM", _WAITS)
    monkeypatch.setattr(ChildProcess, "program", _WAITS)
    monkeypatch.setenv(early.LIFELINE, "3:1")
    begun = early.begin()
    monkeypatch.delenv(early.LIFELINE)  # as a server does before it starts children
    yield begun
    early.end()


def start(tmp_path: Path, **options) -> int:
    child = ChildProcess("scheduler", ServerArgs(**options), Ports.in_directory(tmp_path))
    child.kill()
    with pytest.raises(ExecutionError, match="during start-up"):
        child.wait_ready()
    return child.pid


def test_the_first_scheduler_is_the_process_that_began_early_and_the_next_one_is_not(
    tmp_path: Path, begun: early.Started
):
    pid = begun.popen.pid

    assert start(tmp_path) == pid
    assert start(tmp_path) != pid


@pytest.mark.parametrize("options", [{"tp_size": 2}, {"numa_bind": True}, {"child_env": "EARLY_OTHER"}])
def test_what_it_cannot_become_is_started_anew_and_nothing_is_left(
    tmp_path: Path, begun: early.Started, options: dict, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("EARLY_OTHER", "x")
    assert start(tmp_path, **options) != begun.popen.pid
    early.end()

    assert begun.popen.returncode is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(begun.reports_fd)


def test_one_whose_parent_says_nothing_ends_without_a_word():
    done = subprocess.run(
        [*early.PROGRAM, "scheduler", early.IS_EARLY], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_a_command_that_is_refused_leaves_no_process(tmp_path: Path):
    found = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "serve", "--no-such-option"],
        env=os.environ | {"HEADRACE_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    left = [folder for folder in Path("/proc").glob("[0-9]*/environ") if os.fsencode(tmp_path) in _read(folder)]
    assert found.returncode == 2
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
