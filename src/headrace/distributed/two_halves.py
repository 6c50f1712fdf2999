"""Two halves of a step that take turns in the layers, where these run one by one: while the ranks sum for one half, the other is computed. The native
call over all layers has halves of its own (csrc/cpu/decoder.cpp).
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from headrace.distributed.one_host import SharedMemoryGroup
from headrace.errors import ExecutionError

T = TypeVar("T")


class _Own(threading.local):
    half: int | None = None


class TwoHalves:
    """A group as the layers see it: `Collectives`. In `run`, a sum lets the other half go on until that one sums, too.

    Each half has a thread, and only one of the two is between two sums. Where the second half reads what the first one writes in a layer (keys of the
    same sequence), it finds it: the first is always ahead.
    """

    def __init__(self, group: SharedMemoryGroup) -> None:
        self.rank, self.size, self.address = group.rank, group.size, group.address
        self.gather = group.gather
        self._group = group
        self._own = _Own()
        self._turns: list[threading.Semaphore] = []
        self._ended: list[bool] = []
        self._has_failed = False
        self._thread = ThreadPoolExecutor(1, "second half")

    def all_reduce(self, x: torch.Tensor) -> None:
        half = self._own.half
        if half is None:
            self._group.all_reduce(x)
            return
        self._group.begin_sum(x)
        if not self._ended[1 - half]:
            self._turns[1 - half].release()
            self._turns[half].acquire()
        if self._has_failed:
            raise ExecutionError("the other half of the step failed")
        self._group.finish_sum(x)

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> list[T]:
        """What both return. They make the same number of sums. Raises what the first of them to fail raises."""
        self._turns = [threading.Semaphore(0), threading.Semaphore(0)]
        self._ended, self._has_failed = [False, False], False
        later = self._thread.submit(self._run_half, 1, second)
        try:
            return [self._run_half(0, first), later.result()]
        except Exception:
            failure = later.exception()
            if failure is not None and not isinstance(failure, ExecutionError):
                raise failure from None
            raise

    def _run_half(self, half: int, act: Callable[[], T]) -> T:
        if half == 1:
            self._turns[1].acquire()
        self._own.half = half
        try:
            with torch.inference_mode():
                return act()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._own.half = None
            self._ended[half] = True
            self._turns[1 - half].release()
