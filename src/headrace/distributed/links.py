"""A link between two stages on one host: a pair of connected sockets (unix(7)), an end for each process.

A sender never waits: what the socket has no room for is sent by a thread. The same thread sends heartbeats, so that a receiver can tell
a sender that computes for long from one that was stopped.
"""

import contextlib
import socket
import struct
import threading
from collections import deque

import torch

from headrace.errors import ExecutionError

_HEADER = struct.Struct("<ii")
"""Before each message: rows and columns of what follows, or _ALIVE."""
_ALIVE = _HEADER.pack(-1, -1)
_SIGNS_PER_LIMIT = 5


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
        """See `Sender.send`."""
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
        """See `Sender.close`. What has not been sent is lost."""
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
        """See `Receiver.receive`."""
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
        """See `Receiver.close`."""
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
    ends = socket.socketpair()
    sender, receiver = (end.detach() for end in ends)
    return sender, receiver
