"""One thread that stays, for work that makes much of many small pieces, such as a grammar library's vocabulary.

malloc has a pool of memory (an arena) for each of a few threads, and keeps most of what is freed in it. A process that makes one engine after the
other (--single-process) would otherwise do this work in another arena each time, until all have grown.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_threads: list[ThreadPoolExecutor] = []
"""The thread, once there is one."""


def run_in_lasting_thread(work: Callable[[], T]) -> "Future[T]":
    """Begin `work` when the thread is free. From any thread."""
    if not _threads:
        _threads.append(ThreadPoolExecutor(1, "lasting"))
    return _threads[0].submit(work)


# The child of a fork has no thread.
os.register_at_fork(after_in_child=_threads.clear)
