"""One thread that stays, for work that makes much of many small pieces, such as a grammar library's vocabulary.

malloc has a pool of memory (an arena) for each of a few threads, and keeps most of what is freed in it. A process that makes one engine after the
other (--single-process) would otherwise do this work in another arena each time, until all have grown.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class _LastingThread:
    """Does work in the order in which it comes. A daemon, unlike the threads of an executor: a process that is told to end does not wait for it."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Be as new: the child of a fork has no thread, and perhaps a lock that nobody releases."""
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._begun = False
        self._lock = threading.Lock()

    def put(self, work: Callable[[], None]) -> None:
        """Begin `work`, which raises nothing, when the thread is free; the first begins the thread."""
        self._work.put(work)
        with self._lock:
            if not self._begun:
                threading.Thread(target=self._run, name="lasting", daemon=True).start()
                self._begun = True

    def _run(self) -> None:
        while True:
            self._work.get()()


_thread = _LastingThread()


def run_in_lasting_thread(work: Callable[[], T]) -> "Future[T]":
    """Begin `work` when the thread is free. From any thread."""
    future: Future[T] = Future()
    _thread.put(partial(_do, work, future))
    return future


def _do(work: Callable[[], T], future: "Future[T]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # raised again by `result`
        future.set_exception(error)
        del work, future  # which the error's traceback would keep


os.register_at_fork(after_in_child=_thread.forget)
