"""Threads that load a model: each reads, checks, quantises and packs one tensor at a time.

Owns how many tensors are in work at once. Does not own what is done with them (`load_weights`, `calibrate`). Torch's own threads do not
help: loading is thousands of short operations, at the end of each of which OpenMP's threads spin, so on busy cores two of them take many
times as long as one. Here each thread runs its operations alone, and waits without spinning; the results have the same bits.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from headrace.execution.memory import available_bytes

_MEMORY_SHARE = 8
"""Jobs that run at the same time take at most this part of the free memory, unless one alone takes more."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Job(Generic[_Result]):
    """work: run in one of the threads. num_bytes: of its temporaries, about."""

    work: Callable[[], _Result]
    num_bytes: int


class LoadThreads:
    """Runs jobs: by default in the calling thread, else in up to `num` threads of `pool`. max_bytes: of the jobs that run at once."""

    def __init__(self, pool: Executor | None = None, num: int = 1, max_bytes: int = 0) -> None:
        self._pool = pool
        self._num = num
        self._max_bytes = max_bytes

    def run(self, jobs: Iterable[Job[_Result]]) -> Iterator[_Result]:
        """Run the jobs and give their results in the order in which they end; raises what a job raises.

        The calling thread makes the jobs, each only when the ones before it leave a thread and memory for it.
        """
        if self._pool is None:
            for job in jobs:
                yield job.work()
            return
        running: dict[Future[_Result], int] = {}
        for job in jobs:
            while running and sum(running.values()) + job.num_bytes > self._max_bytes:
                yield from _ended(running)
            running[self._pool.submit(job.work)] = job.num_bytes
            while len(running) >= self._num:
                yield from _ended(running)
        while running:
            yield from _ended(running)


IN_THIS_THREAD = LoadThreads()


@contextmanager
def load_threads(num: int) -> Iterator[LoadThreads]:
    """`num` threads, which end with the context. Torch computes with one thread in each of them, and in the calling thread meanwhile."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if num == 1:
            yield LoadThreads()
            return
        max_bytes = available_bytes(torch.device("cpu")) // _MEMORY_SHARE
        with ThreadPoolExecutor(num, "load", initializer=partial(torch.set_grad_enabled, False)) as pool:
            yield LoadThreads(pool, num, max_bytes)
    finally:
        torch.set_num_threads(torch_threads)


def _ended(running: dict[Future[_Result], int]) -> Iterator[_Result]:
    """Wait until at least one has ended, and take those that have."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        del running[future]
        yield future.result()
