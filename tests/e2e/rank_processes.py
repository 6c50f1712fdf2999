"""The processes of ranks, for tests that end one."""

import contextlib

import psutil


def followers(pid: int | None = None) -> set[psutil.Process]:
    """The processes of ranks that do not lead, of all engines of this process, or of those that it has started with this id."""
    found = set()
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "follower" in process.cmdline():
                found.add(process)
    return found
