"""Notices the death of the process that started this one: `follow`, and for a child that may have been stopped `die_with`.

The parent keeps the writing end of a pipe open and never writes. However the parent ends, SIGKILL included, the kernel closes that
end and the reader sees the end of file. Unlike PR_SET_PDEATHSIG, which fires when the *thread* that forked ends, this works from any
thread. Used by the children of an engine (on stdin) and by a server that a Runtime owns. One daemon thread per lifeline.
"""

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable

from headrace.errors import ConfigError

VARIABLE = "HEADRACE_LIFELINE"
"""Names the lifeline of a server that has an owner: `descriptor:pid of the owner`."""

POLL_S = 0.5
_PR_SET_PDEATHSIG = 1


def follow(fd: int, parent_pid: int, on_gone: Callable[[], None]) -> threading.Thread:
    """Call `on_gone` from a thread once the parent is gone. fd: the reading end of its pipe, which the thread owns."""
    thread = threading.Thread(target=_wait, args=(fd, parent_pid, on_gone), name="lifeline", daemon=True)
    thread.start()
    return thread


def die_with(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends (prctl(2)), which must be one that lives as long as its process.

    It reaches also a process that was stopped (SIGSTOP) and can notice nothing. Does nothing where there is no such call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it was gone before
        os._exit(1)


def follow_owner(on_gone: Callable[[], None]) -> None:
    """As `follow`, for the owner named in the environment; does nothing when there is none. Our children do not inherit the pipe.

    Raises ConfigError when the variable cannot be read.
    """
    named = os.environ.pop(VARIABLE, None)
    if named is None:
        return
    fd, _, pid = named.partition(":")
    try:
        os.set_inheritable(int(fd), False)
        owner_pid = int(pid)
    except (ValueError, OSError):
        raise ConfigError(f"{VARIABLE} must be DESCRIPTOR:PID of an open pipe, got {named[:80]!r}") from None
    follow(int(fd), owner_pid, on_gone)


def _wait(fd: int, parent_pid: int, on_gone: Callable[[], None]) -> None:
    # A program that forks holds copies of the writing end, so the parent's pid is looked at as well.
    while os.getppid() == parent_pid:
        if select.select([fd], [], [], POLL_S)[0] and not os.read(fd, 1):
            break
    on_gone()
