"""What belongs to a process ends with it, however that process ends, and only then."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.messages.channel import IpcDir, Ports
from headrace.processes import lifeline
from headrace.processes.child import ChildProcess

CHILD = """
import os, signal, sys
from headrace.processes import lifeline
lifeline.follow(0, os.getppid(), lambda: os._exit(1))
print("up", flush=True)
signal.pause()
"""
PARENT = f"""
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE)
signal.pause()
"""
OWNED = """
import os, signal
from headrace import serve
from headrace.processes import lifeline
serve.OWNER_GONE_S = (0.0, 0.0)
seen = []
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
lifeline.follow_owner(serve._leave_with_owner)
assert lifeline.VARIABLE not in os.environ
print("up", flush=True)
while True:
    signal.pause()
"""


def test_a_child_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        # The child holds the writing end of this pipe: its end of file is the child's end.
        assert parent.stdout.read() == b""


def test_a_child_outlives_the_thread_that_started_it():
    args = ServerArgs(model_path="smollm2", log_level="warning")
    with IpcDir() as folder:
        started = []
        thread = threading.Thread(
            target=lambda: started.append(ChildProcess("detokenizer", args, Ports.in_directory(folder)))
        )
        thread.start()
        thread.join()
        child = started[0]
        try:
            child.wait_ready()
            assert child.exit_code is None
        finally:
            child.kill()
    assert child.exit_code == -signal.SIGKILL


def test_a_server_is_told_to_stop_when_its_owner_is_gone_and_goes_in_any_case():
    theirs, ours = os.pipe()
    environment = {**os.environ, lifeline.VARIABLE: f"{theirs}:{os.getpid()}"}
    with subprocess.Popen(
        [sys.executable, "-c", OWNED], stdout=subprocess.PIPE, pass_fds=(theirs,), env=environment
    ) as server:
        os.close(theirs)
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        os.close(ours)
        assert server.wait(60) == 1


@pytest.mark.parametrize("value", ["", "x:1", "3", "99999:1"])
def test_a_lifeline_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setenv(lifeline.VARIABLE, value)
    with pytest.raises(ConfigError, match=lifeline.VARIABLE):
        lifeline.follow_owner(lambda: None)


def test_without_an_owner_there_is_nothing_to_follow(monkeypatch):
    monkeypatch.delenv(lifeline.VARIABLE, raising=False)
    before = threading.active_count()
    lifeline.follow_owner(lambda: None)
    assert threading.active_count() == before
