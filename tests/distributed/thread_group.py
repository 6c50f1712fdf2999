"""Ranks as threads of one process, for tests of the layers."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from headrace.distributed.base import Shard, Stage
from headrace.distributed.one_host import SocketReceiver, SocketSender, socket_link

LIMIT_S = 60.0
"""Reached only when a test fails."""


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.given: list[torch.Tensor | None] = [None] * size
        self.messages = [queue.SimpleQueue[bytes]() for _ in range(size)]


class ThreadGroup:
    """A `Group` of threads. No address: layers that sum within a native call are not run so."""

    address = 0
    spans_hosts = False

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._meeting = meeting

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.given[self.rank] = x.clone()
        self._meeting.barrier.wait()
        given = [part.clone() for part in self._meeting.given if part is not None]
        self._meeting.barrier.wait()
        return given

    def all_reduce(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        first, *others = self._exchange(x)
        for other in others:
            first += other
        x.copy_(first)

    def gather(self, x: torch.Tensor, columns: Sequence[int], out: torch.Tensor | None) -> None:
        parts = self._exchange(x)
        assert [part.shape[1] for part in parts] == list(columns)
        if out is not None:
            out.copy_(torch.cat(parts, dim=1))

    def send(self, message: bytes) -> None:
        for other in self._meeting.messages[1:]:
            other.put(message)

    def receive(self) -> bytes:
        return self._meeting.messages[self.rank].get(timeout=LIMIT_S)

    def break_up(self, reason: str) -> None:
        self._meeting.barrier.abort()

    def close(self) -> None:
        pass


def on_ranks(size: int, act: Callable[[Shard], Any]) -> list[Any]:
    """The results of `act` on every rank, run at the same time."""
    meeting = _Meeting(size)
    shards = [Shard(rank, size, ThreadGroup(meeting, rank, size)) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        running = [threads.submit(act, shard) for shard in shards]
        return [one.result() for one in running]


def on_stages(count: int, act: Callable[[Stage], Any]) -> list[Any]:
    """The results of `act` on every stage, run at the same time."""
    links = [socket_link() for _ in range(count)]  # from stage i to the one after it
    senders = [SocketSender(fd, LIMIT_S) for fd, _ in links]
    receivers = [SocketReceiver(fd, LIMIT_S) for _, fd in links]
    stages = [Stage(index, count, receivers[index - 1], senders[index]) for index in range(count)]
    try:
        with ThreadPoolExecutor(count) as threads:
            running = [threads.submit(act, stage) for stage in stages]
            return [one.result() for one in running]
    finally:
        for end in [*senders, *receivers]:
            end.close()
