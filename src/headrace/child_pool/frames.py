"""Messages over the stream socket between a pool and a child of it. Owns the socket. Used by one thread at a time."""

import select
import socket
import struct
import time
from typing import TypeVar

import msgspec

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 18


class Frames:
    """Messages over a stream socket: 4 bytes of length, little-endian, and msgpack. Owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: msgspec.Struct | msgspec.Raw, timeout_s: float | None = None) -> None:
        """Raises TimeoutError, or OSError if the other side is gone."""
        data = msgspec.msgpack.encode(message)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_LENGTH.pack(len(data)))
        self._socket.sendall(data)

    def receive(self, decoder: msgspec.msgpack.Decoder[T], timeout_s: float | None = None) -> T:
        """Raises EOFError when the other side is gone, TimeoutError when the whole message is not there in time."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, until_s))
        return decoder.decode(self._read(length, until_s))

    def wait(self, timeout_s: float) -> bool:
        """Whether something has arrived, or the other side has gone, within that time."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Close the socket, which no thread may be using."""
        self._socket.close()

    def _read(self, num_bytes: int, until_s: float | None) -> bytearray:
        data = bytearray()
        while len(data) < num_bytes:
            if until_s is not None:
                # Zero would make the socket non-blocking.
                self._socket.settimeout(max(until_s - time.monotonic(), 1e-3))
            else:
                self._socket.settimeout(None)
            try:
                chunk = self._socket.recv(min(num_bytes - len(data), _CHUNK_BYTES))
            except ConnectionError:
                chunk = b""  # the other side ended with unread data
            if not chunk:
                raise EOFError("the other side closed the socket")
            data += chunk
        return data
