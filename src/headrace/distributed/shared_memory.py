"""The group of ranks on one host: csrc/cpu/rank_group.h, over memory that their processes share.

The leader makes the memory, a file without a name, and hands its descriptor to the followers when it starts them. Sums, gathers and messages
do not meet: a rank may use another thread for each of the three, one thread at a time. Only `break_up` may be called by any thread.
"""

import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Self

import torch

from headrace.errors import ConfigError, ExecutionError
from headrace.kernels import cpu


class SharedMemoryGroup:
    """A `Group`. After it was broken up, or a call took longer than its limit, it is of no use any more: all ranks make a new one."""

    spans_hosts = False

    def __init__(self, native_group: Any, rank: int, size: int) -> None:
        """native_group: `_native.RankGroup`. See `create` and `join`."""
        self.rank = rank
        self.size = size
        self._native = native_group
        self._is_closed = False

    @classmethod
    def create(cls, size: int, limit_s: float) -> tuple[Self, int]:
        """A new group of `size` ranks, for rank 0, and the descriptor of its memory.

        limit_s: how long a call waits for another rank. Followers inherit the descriptor and `join` by it; the caller closes it when they were
        started. Raises ConfigError without the native extension, ValueError when an argument does not fit.
        """
        fd = cls.memory(size)
        try:
            return cls.join(fd, 0, size, limit_s), fd
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def memory(size: int) -> int:
        """The descriptor of the memory of a new group, which every rank is still to `join`. Raises as `create` does."""
        native = _load()
        fd = os.memfd_create("headrace-ranks")
        try:
            os.ftruncate(fd, native.RankGroup.bytes(size))
        except BaseException:
            os.close(fd)
            raise
        return fd

    @classmethod
    def join(cls, fd: int, rank: int, size: int, limit_s: float) -> Self:
        """The group with this descriptor, for rank `rank`, once for each. The descriptor stays the caller's, who may close it at once.

        Raises ConfigError without the native extension, ValueError when an argument does not fit.
        """
        return cls(_load().RankGroup(fd, rank, size, limit_s), rank, size)

    @property
    def address(self) -> int:
        """Of the native group, for native calls that sum over the ranks. It is good as long as this object lives, also when it is closed."""
        return int(self._native.address())

    def all_reduce(self, x: torch.Tensor) -> None:
        """See `Group.all_reduce`. ValueError unless x is float32, contiguous and on the CPU."""
        if not x.is_contiguous():
            raise ValueError(f"all_reduce: strides {x.stride()} of a tensor {list(x.shape)} that is not contiguous")
        self._call(self._native.all_reduce, _address(x), x.numel())

    def gather(self, x: torch.Tensor, columns: Sequence[int], out: torch.Tensor | None) -> None:
        """See `Group.gather`. Rows may lie apart. ValueError when a shape does not fit."""
        if len(columns) != self.size:
            raise ValueError(f"gather: {len(columns)} numbers of columns for {self.size} ranks")
        rows = x.shape[0]
        _check_rows(x, rows, columns[self.rank])
        if out is not None:
            _check_rows(out, rows, sum(columns))
        # A tensor of one row may have any stride.
        strides = [max(t.stride(0), t.shape[1]) if t is not None else 0 for t in (x, out)]
        there = 0 if out is None else _address(out)
        self._call(self._native.gather, _address(x), strides[0], rows, list(columns), there, strides[1])

    def send(self, message: bytes) -> None:
        """See `Group.send`. Waits only while some 512 KB of messages before it have not been received."""
        self._call(self._native.send, message)

    def receive(self) -> bytes:
        """See `Group.receive`."""
        return bytes(self._call(self._native.receive))

    def wait_for_ranks(self, limit_s: float, check: Callable[[], None]) -> None:
        """See `Group.wait_for_ranks`. There are no other hosts."""

    def ready(self) -> None:
        """See `Group.ready`. Who started the follower knows."""

    def wait_ready(self, check: Callable[[], None]) -> None:
        """See `Group.wait_ready`. There are no other hosts."""

    def failure(self) -> str | None:
        """See `Group.failure`. It shows in calls, and by processes that end."""
        return None

    def break_up(self, reason: str) -> None:
        """See `Group.break_up`. The first reason stays."""
        self._native.break_up(reason)

    def close(self) -> None:
        """Leave the group: later calls raise ExecutionError. Idempotent. The others are not told. The memory goes with this object."""
        self._is_closed = True

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._is_closed:
            raise ExecutionError(f"rank {self.rank} has left its group")
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise ExecutionError(f"the group of ranks is broken: {error}") from None


def _load() -> ModuleType:
    native = cpu.load()
    if native is None:
        raise ConfigError(f"several ranks on one host need the native kernels: {cpu.why_not()}")
    return native


def _address(x: torch.Tensor) -> int:
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"ranks exchange float32 on the CPU, not {x.dtype} on {x.device}")
    return x.data_ptr()


def _check_rows(x: torch.Tensor, rows: int, columns: int) -> None:
    if x.shape != (rows, columns) or (columns > 1 and x.stride(1) != 1):
        raise ValueError(
            f"gather: a tensor {list(x.shape)} with strides {x.stride()} for {rows} rows of {columns} columns"
        )
