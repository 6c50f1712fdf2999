"""Ranks on one host: their group, csrc/cpu/rank_group.h, over memory that their processes share; and links between two stages, pairs of connected
sockets (unix(7)).

The leader makes the memory, a file without a name, and hands its descriptor to the followers when it starts them. Sums, gathers and messages
do not meet: a rank may use another thread for each of the three, one thread at a time. Only `break_up` may be called by any thread.

A sender of a link never waits: what the socket has no room for is sent by a thread. The same thread sends heartbeats, so that a receiver can tell
a sender that computes for long from one that was stopped.
"""

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Self

import torch

from headrace.distributed.base import check_rows, check_sum
from headrace.errors import ConfigError, ExecutionError
from headrace.kernels import cpu

_HEADER = struct.Struct("<ii")
"""Before each message: rows and columns of what follows, or _ALIVE."""
_ALIVE = _HEADER.pack(-1, -1)
_SIGNS_PER_LIMIT = 5


class SharedMemoryGroup:
    """A `Group`. After it was broken up, or a call took longer than its limit, it is of no use any more: all ranks make a new one."""

    spans_hosts = False

    def __init__(self, native_group: Any, rank: int, size: int) -> None:
        """native_group: `_native.RankGroup`. See `join`."""
        self.rank = rank
        self.size = size
        self._native = native_group
        self._is_closed = False

    @staticmethod
    def memory(size: int) -> int:
        """The descriptor of the memory of a new group, which every rank is still to `join`. Raises as that does."""
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

        limit_s: how long a call waits for another rank. Raises ConfigError without the native extension, ValueError when an argument does not fit.
        """
        return cls(_load().RankGroup(fd, rank, size, limit_s), rank, size)

    @property
    def address(self) -> int:
        """Of the native group, for native calls that sum over the ranks. It is good as long as this object lives, also when it is closed."""
        return int(self._native.address())

    def all_reduce(self, x: torch.Tensor) -> None:
        check_sum(x)
        self._call(self._native.all_reduce, x.data_ptr(), x.numel())

    def begin_sum(self, x: torch.Tensor) -> None:
        """The first part of `all_reduce`, which waits for nobody; `finish_sum` of the same x is the second. Two may have begun, and end in order."""
        check_sum(x)
        self._call(self._native.begin_sum, x.data_ptr(), x.numel())

    def finish_sum(self, x: torch.Tensor) -> None:
        self._call(self._native.finish_sum, x.data_ptr(), x.numel())

    @property
    def num_begun(self) -> int:
        """Sums that this rank did not wait for at once."""
        return int(self._native.num_begun())

    def gather(self, x: torch.Tensor, columns: Sequence[int], out: torch.Tensor | None) -> None:
        if len(columns) != self.size:
            raise ValueError(f"gather: {len(columns)} numbers of columns for {self.size} ranks")
        rows = x.shape[0]
        check_rows(x, rows, columns[self.rank])
        if out is not None:
            check_rows(out, rows, sum(columns))
        # A tensor of one row may have any stride.
        strides = [max(t.stride(0), t.shape[1]) if t is not None else 0 for t in (x, out)]
        there = 0 if out is None else out.data_ptr()
        self._call(self._native.gather, x.data_ptr(), strides[0], rows, list(columns), there, strides[1])

    def send(self, message: bytes) -> None:
        """Waits only while some 512 KB of messages before it have not been received."""
        self._call(self._native.send, message)

    def receive(self) -> bytes:
        return bytes(self._call(self._native.receive))

    def wait_for_ranks(self, limit_s: float, check: Callable[[], None]) -> None:
        """There are no other hosts."""

    def ready(self) -> None:
        """Who started the follower knows."""

    def wait_ready(self, check: Callable[[], None]) -> None:
        """There are no other hosts."""

    def failure(self) -> str | None:
        """It shows in calls, and by processes that end."""
        return None

    def break_up(self, reason: str) -> None:
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


class SocketSender:
    """The sending end. `send` is called by one thread."""

    def __init__(self, fd: int, limit_s: float) -> None:
        """fd: of the socket, which is this object's from now on. limit_s: of the receiver."""
        self._socket = socket.socket(fileno=fd)
        self._sign_s = limit_s / _SIGNS_PER_LIMIT
        # The thread sends the first of them; it stays in the queue until all of it has been sent.
        self._unsent: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._send_rest, name="stage link", daemon=True)
        self._thread.start()

    def send(self, hidden: torch.Tensor) -> None:
        assert hidden.dtype == torch.float32, hidden.dtype
        parts = [memoryview(_HEADER.pack(*hidden.shape)), _bytes_of(hidden)]
        with self._changed:
            if self._is_closed:
                raise ExecutionError("the next stage is gone")
            sent = 0 if self._unsent else self._send_now(parts)
            for part in parts:
                if sent < len(part):
                    self._unsent.append(part[sent:])
                sent = max(0, sent - len(part))
            if self._unsent:
                self._changed.notify()

    def close(self) -> None:
        """What has not been sent is lost."""
        with self._changed:
            self._is_closed = True
            self._unsent.clear()
            self._changed.notify()
        with contextlib.suppress(OSError):  # the other end is gone, or the thread has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _send_now(self, parts: list[memoryview]) -> int:
        """As much as there is room for. Returns the number of bytes."""
        try:
            return self._socket.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._is_closed = True
            raise ExecutionError("the next stage is gone") from None

    def _send_rest(self) -> None:
        with contextlib.suppress(OSError):  # the receiver is gone; the next `send` says so
            while (part := self._next()) is not None:
                sent = self._socket.send(part)
                with self._changed:
                    if self._unsent:
                        self._unsent[0] = part[sent:]
                        if sent == len(part):
                            self._unsent.popleft()
        with self._changed:
            self._is_closed = True
        self._socket.close()

    def _next(self) -> memoryview | None:
        """What is to be sent next, once there is something; None when the link is closed."""
        with self._changed:
            while not self._is_closed and not self._unsent:
                if not self._changed.wait(self._sign_s):
                    with contextlib.suppress(BlockingIOError):  # the receiver has more than enough of them
                        self._socket.send(_ALIVE, socket.MSG_DONTWAIT)
            return None if self._is_closed else self._unsent[0]


class SocketReceiver:
    """The receiving end, used by one thread."""

    def __init__(self, fd: int, limit_s: float) -> None:
        """fd: of the socket, which is this object's from now on. limit_s: how long to wait without any heartbeat."""
        self._socket = socket.socket(fileno=fd)
        self._socket.settimeout(limit_s)
        self._limit_s = limit_s

    def receive(self, rows: int) -> torch.Tensor:
        header = bytearray(_ALIVE)
        while header == _ALIVE:
            self._fill(memoryview(header))
        found, columns = _HEADER.unpack(header)
        if found != rows:
            raise ExecutionError(f"the stage before sent {found} rows in place of {rows}")
        hidden = torch.empty(rows, columns)
        self._fill(_bytes_of(hidden))
        return hidden

    def close(self) -> None:
        self._socket.close()

    def _fill(self, data: memoryview) -> None:
        while data:
            try:
                count = self._socket.recv_into(data)
            except TimeoutError:
                raise ExecutionError(f"the stage before has sent no heartbeat for {self._limit_s:g} s") from None
            except OSError:
                count = 0
            if not count:
                raise ExecutionError("the stage before is gone")
            data = data[count:]


def _bytes_of(hidden: torch.Tensor) -> memoryview:
    # A view of no bytes cannot be cast.
    return hidden.numpy().reshape(-1).data.cast("B") if hidden.numel() else memoryview(b"")


def socket_link() -> tuple[int, int]:
    """A new link: the descriptors of the sending and of the receiving end."""
    sender, receiver = socket.socketpair()
    return sender.detach(), receiver.detach()
