"""The ranks of a scheduler while they start: with stand-ins for the followers."""

import sys
import time
from pathlib import Path

import pytest

from headrace.config.server_args import ServerArgs
from headrace.errors import ExecutionError
from headrace.messages.channel import Ports
from headrace.processes.child import ChildProcess
from headrace.processes.ranks import Ranks

LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os._exit(3)", r"the process of rank 1 of the scheduler died during start-up \(exit code 3\)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process of rank 1 of the scheduler was killed .* memory ran out"),
    ],
    ids=["exits", "killed"],
)
def test_a_follower_that_ends_while_the_leader_loads_ends_the_loading(
    end: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ChildProcess, "program", (sys.executable, "-c", f"import os, signal; {end}"))
    seen = []
    with Ranks(ServerArgs(model_path="smollm2", tp_size=2), Ports.in_directory(tmp_path), 0) as ranks:
        progress = ranks.checked(lambda done, total: seen.append((done, total)))
        with pytest.raises(ExecutionError, match=said):
            load(progress)
    assert set(seen) <= {(1, 2)}


def load(progress):
    """A leader that never ends by itself."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        progress(1, 2)
        time.sleep(0.01)
