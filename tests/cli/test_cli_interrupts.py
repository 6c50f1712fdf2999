"""Ctrl-C at any time of a start: no traceback, neither of the program nor of its processes."""

import signal
import subprocess
import sys

import pytest

from headrace.processes.early import IGNORED, signals_held


def test_ctrl_c_while_commands_are_imported_is_one_line():
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'headrace.cli.app':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from headrace.cli import main\n"
        "main(['version'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "headrace: interrupted\n")


@pytest.mark.parametrize("number", IGNORED)
def test_a_process_is_not_reached_by_signals_before_it_says_that_it_ignores_them(number):
    """A stand-in that sends the signal to itself, first as it was started and then as a child of an engine goes on."""
    code = f"""
import os, signal
os.kill(os.getpid(), {int(number)})
print("lives", flush=True)
signal.signal({int(number)}, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [{int(number)}])
os.kill(os.getpid(), {int(number)})
print("ignores", flush=True)
"""
    with signals_held():
        started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    out, _ = started.communicate(timeout=60)

    assert (started.returncode, out.split()) == (0, ["lives", "ignores"])
    assert not set(IGNORED) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
