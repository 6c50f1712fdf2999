"""Channels between processes: a datagram on a Unix socket is a message, so that it costs each side one system call and wakes one thread.

Owns the sockets, and the messages for which a receiver has no room yet. Frames are `MessageCodec`'s. A datagram is never larger than
MAX_DATAGRAM_BYTES: a larger frame goes into an anonymous file, and an empty datagram carries its descriptor (unix(7), SCM_RIGHTS).
"""

import array
import asyncio
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from headrace.log import get_logger
from headrace.messages.channel import ChannelName, Message, MessageCodec, Ports

logger = get_logger(__name__)

MAX_DATAGRAM_BYTES = 32 << 10
RETRY_S = 0.02
"""How often a sender looks whether its receiver exists by now."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)


class SocketSender:
    """Sends at once if the receiver exists and has room; otherwise the message waits here, without limit, and a thread sends it.

    The front end limits the requests in the system.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._codec = MessageCodec()
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._is_connected = False
        self._unsent: deque[bytes] = deque()
        self._closed = threading.Event()

    def send(self, message: Message) -> None:
        """See `Sender`. After `close` it does nothing."""
        frame = self._codec.encode(message)
        with self._lock:
            if self._closed.is_set():
                return
            if self._unsent:
                self._unsent.append(frame)
            elif not self._transmit(frame):
                self._unsent.append(frame)
                threading.Thread(target=self._send_rest, name="unsent messages", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._unsent.clear()
            self._socket.close()

    def _transmit(self, frame: bytes) -> bool:
        """Send one frame without waiting. False if it has to be sent later."""
        try:
            if not self._is_connected:
                self._socket.connect(self._address)
                self._is_connected = True
            if len(frame) <= MAX_DATAGRAM_BYTES:
                self._socket.send(frame, socket.MSG_DONTWAIT)
            else:
                _send_as_file(self._socket, frame)
        except BlockingIOError:  # no room
            return False
        except OSError:  # no receiver yet, or it has died and the next one will bind the address
            self._is_connected = False
            return False
        return True

    def _send_rest(self) -> None:
        """In a thread: send what waits, in order."""
        while True:
            with self._lock:
                while self._unsent and self._transmit(self._unsent[0]):
                    self._unsent.popleft()
                if not self._unsent:
                    return
                fd = self._socket.fileno() if self._is_connected else -1
            if fd < 0:
                self._closed.wait(RETRY_S)
            else:
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll(RETRY_S * 1000)


class SocketReceiver:
    """A socket that binds the channel's address. An event loop that listens watches it with its own selector."""

    def __init__(self, address: str) -> None:
        self.dropped_frames = 0
        self._codec = MessageCodec()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        Path(address).unlink(missing_ok=True)  # of a receiver that has died
        self._socket.bind(address)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._timeout_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def recv_nowait(self) -> Message | None:
        # Mostly there is nothing, and an empty list is cheaper than an exception.
        return self._take(socket.MSG_DONTWAIT) if self._poll.poll(0) else None

    def recv(self, timeout_s: float) -> Message | None:
        if timeout_s <= 0:
            return self.recv_nowait()
        if timeout_s != self._timeout_s:
            # A timeout of the socket: Python's own would poll before each message.
            self._timeout_s = timeout_s
            seconds, rest = divmod(max(timeout_s, 1e-6), 1.0)
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), int(rest * 1e6))
            )
        return self._take(0)

    def listen(self, take: Callable[[Message], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._hand_over, take)

    def close(self) -> None:
        """See `Receiver`. After `listen`: call it in that loop, or after the loop has stopped."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._loop = None
        self._socket.close()

    def _take(self, flags: int) -> Message | None:
        while True:
            try:
                frame, ancillary, _, _ = self._socket.recvmsg(
                    MAX_DATAGRAM_BYTES, _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            if ancillary:
                frame = _read_file(part for _, _, part in ancillary)
            message = self._codec.decode(frame)
            if message is not None:
                return message
            self.dropped_frames += 1
            logger.warning("dropped a malformed frame of %d bytes (%d so far)", len(frame), self.dropped_frames)

    def _hand_over(self, take: Callable[[Message], None]) -> None:
        # One message: the loop calls again while there are more, and other work gets its turn between them.
        message = self._take(socket.MSG_DONTWAIT)
        if message is not None:
            take(message)


class SocketChannels:
    """The channels of `ports` between processes. Each process makes its own."""

    def __init__(self, ports: Ports) -> None:
        self.ports = ports
        self._ends: list[SocketSender | SocketReceiver] = []

    def sender(self, name: ChannelName, index: int = 0) -> SocketSender:
        end = SocketSender(self._address(name, index))
        self._ends.append(end)
        return end

    def receiver(self, name: ChannelName, index: int = 0) -> SocketReceiver:
        end = SocketReceiver(self._address(name, index))
        self._ends.append(end)
        return end

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self._ends.clear()

    def _address(self, name: ChannelName, index: int) -> str:
        address: str = getattr(self.ports, name)
        return f"{address}.{index}" if index else address


def _send_as_file(connected: socket.socket, frame: bytes) -> None:
    """Raises BlockingIOError when the receiver has no room."""
    fd = os.memfd_create("message")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(frame)
        socket.send_fds(connected, [b""], [fd], socket.MSG_DONTWAIT)
    finally:
        os.close(fd)


def _read_file(parts: Iterable[bytes]) -> bytes:
    """The file that came with a datagram; empty if it is none that can be read. parts: its descriptor, as the kernel passes it."""
    fds = array.array("i")
    fds.frombytes(b"".join(parts))
    frame = b""
    for fd in fds:
        try:
            frame = os.pread(fd, os.fstat(fd).st_size, 0)
        except OSError:
            logger.warning("a message came with a descriptor that is not a readable file")
        os.close(fd)
    return frame
