"""The processes of ranks, for tests that end one."""

import contextlib

import psutil


def followers() -> set[psutil.Process]:
    """The processes of ranks that do not lead, of all engines of this process."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "follower" in process.cmdline():
                found.add(process)
    return found
