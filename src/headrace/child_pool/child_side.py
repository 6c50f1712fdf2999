"""What a child of a pool does around its work: it ends with its parent, says nothing, and keeps to its limit of memory. And `Frames`, the
messages over the socket between the two, for both sides.

Owns the child's main thread. Does not own the work: `run` is given a function that serves the socket. Runs in the child.
"""

import os
import resource
import select
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec

from headrace.garbage import give_back_free_memory

T = TypeVar("T")
A = TypeVar("A", bound=msgspec.Struct)

MIB = 1 << 20

_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 18


class Ready(msgspec.Struct, frozen=True):
    """The first answer of a child: it can work."""


class Frames:
    """Messages over a stream socket: 4 bytes of length, little-endian, and msgpack. Owns the socket. Used by one thread at a time."""

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
        """No thread may be using the socket."""
        self._socket.close()

    def _read(self, num_bytes: int, until_s: float | None) -> bytearray:
        data = bytearray()
        while len(data) < num_bytes:
            # Zero would make the socket non-blocking.
            self._socket.settimeout(None if until_s is None else max(until_s - time.monotonic(), 1e-3))
            try:
                chunk = self._socket.recv(min(num_bytes - len(data), _CHUNK_BYTES))
            except ConnectionError:
                chunk = b""  # the other side ended with unread data
            if not chunk:
                raise EOFError("the other side closed the socket")
            data += chunk
        return data


def run(serve: Callable[[Frames], None], stack_bytes: int, name: str, nice: int = 10) -> None:
    """Serve the socket that is stdin in a thread, until that returns or the parent ends. Never returns.

    stack_bytes: of the thread. name: of the thread. nice: by how much less of a busy processor the child gets.
    """
    # Its parent tells it when to end, after so much processor time, too: a limit that is inherited counts all questions together.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    os.nice(nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=0)
    parent_pid = os.getppid()
    threading.stack_size(stack_bytes)
    threading.Thread(target=_serve_and_exit, args=(serve, Frames(connection)), name=name, daemon=True).start()
    _wait_for_end(connection.fileno(), parent_pid)
    os._exit(0)


def answer_all(
    frames: Frames,
    jobs: msgspec.msgpack.Decoder[T],
    act: Callable[[T], A],
    memory_bytes: int,
    num_bytes: Callable[[A], int] = lambda answer: 0,
) -> NoReturn:
    """Say that the child can work, and answer every job, with `left_bytes`: by how much the child has grown since.

    memory_bytes: it may allocate so much more than it has now. num_bytes: of an answer, which do not count.
    """
    own_bytes = resident_bytes()
    limit_memory(memory_bytes)
    frames.send(Ready())
    say_no_more()
    while True:
        answer = act(frames.receive(jobs))
        give_back_free_memory()
        left_bytes = max(resident_bytes() - own_bytes - num_bytes(answer), 0)
        frames.send(msgspec.structs.replace(answer, left_bytes=left_bytes))
        del answer


def limit_memory(more_bytes: int) -> None:
    """From now on the process may allocate so much more than it has."""
    limit_bytes = _memory_pages(0) * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def say_no_more() -> None:
    """From now on what libraries print, such as the words of a panic, could hold words of a request."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def resident_bytes() -> int:
    return _memory_pages(1) * resource.getpagesize()


def _serve_and_exit(serve: Callable[[Frames], None], frames: Frames) -> None:
    """The whole process ends with its thread, whatever ends that."""
    try:
        serve(frames)
    except (EOFError, ConnectionError):
        pass
    except BaseException:
        traceback.print_exc()  # unread once there are requests
    finally:
        os._exit(1)


def _wait_for_end(fd: int, parent_pid: int) -> None:
    """Until the parent has closed its end of the socket, or has ended."""
    poll = select.poll()
    poll.register(fd, 0)  # reports only that the other side is closed
    # A program that forks holds copies of the parent's end, so the parent's pid is looked at as well.
    while os.getppid() == parent_pid and not poll.poll(1000):
        pass


def _memory_pages(field: int) -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[field])
