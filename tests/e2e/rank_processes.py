"""The processes of ranks, for tests that end one."""

import contextlib

import psutil

from headrace.api.engine import Engine


def followers(pid: int | None = None) -> set[psutil.Process]:
    """The processes of ranks that do not lead, of all engines of this process, or of those that it has started with this id."""
    found = set()
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "follower" in process.cmdline():
                found.add(process)
    return found


def follower_of(engine: Engine) -> psutil.Process:
    """Of two ranks the one that does not lead."""
    [process] = [psutil.Process(one["pid"]) for one in engine.get_ranks() if one["rank"] == 1]
    return process
