"""A child that tries grammars: `python -m headrace.grammar.compile_child`. A grammar that costs too much costs it its life, not the server's.

Owns the child's side and the frames that both sides exchange; `compile_pool` is the other side. Stdin is a socket. The child is sent a
`Setup`, answers `Ready`, and from then on prints nothing and answers each `GrammarSpec` with a `Verdict`. It ends when the socket closes or
its parent ends.
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
from typing import TypeVar

import msgspec

from headrace.errors import HeadraceError
from headrace.garbage import give_back_free_memory
from headrace.grammar.matcher import LibraryError, MatcherTokens, Template
from headrace.grammar.probe import probe
from headrace.grammar.source import explain, library_text
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages.grammar import GrammarSpec

T = TypeVar("T")

MIB = 1 << 20

_NICE = 10
STACK_BYTES = 8 * MIB
"""Of the thread that compiles. The server gives its own threads twice as much: what recurses too deeply ends a child."""

_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 16


class Setup(msgspec.Struct, frozen=True):
    """What a child is told first. memory_bytes: what it may allocate beyond what it needs itself."""

    vocabulary: Vocabulary
    memory_bytes: int


class Ready(msgspec.Struct, frozen=True):
    """The child can try grammars."""


class Passed(msgspec.Struct, frozen=True, tag=True):
    """A grammar that compiles and has a first mask.

    text: what the library takes. memory_bytes: what the compiled grammar occupies. left_bytes: by how much the child has grown since it was
    ready, once the grammar is gone.
    """

    text: str
    memory_bytes: int
    left_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A grammar that cannot be served, and why, in words for the client. left_bytes: as in `Passed`; 0 if there is no child left."""

    message: str
    left_bytes: int = 0


Verdict = Passed | Refused

VERDICTS: msgspec.msgpack.Decoder[Verdict] = msgspec.msgpack.Decoder(Verdict)
READY = msgspec.msgpack.Decoder(Ready)
_SETUPS = msgspec.msgpack.Decoder(Setup)
_SPECS = msgspec.msgpack.Decoder(GrammarSpec)


class Frames:
    """Messages over a stream socket: 4 bytes of length, little-endian, and msgpack. Owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: msgspec.Struct | msgspec.Raw, timeout_s: float | None = None) -> None:
        """Raises TimeoutError, or OSError if the other side is gone."""
        data = msgspec.msgpack.encode(message)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

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
            try:
                chunk = self._socket.recv(min(num_bytes - len(data), _CHUNK_BYTES))
            except ConnectionError:
                chunk = b""  # the other side ended with unread data
            if not chunk:
                raise EOFError("the other side closed the socket")
            data += chunk
        return data


def try_grammar(tokens: MatcherTokens, spec: GrammarSpec) -> Verdict:
    """Compile a grammar and compute its first mask. It is gone when this returns."""
    give_back_free_memory()  # else what earlier grammars left would hide what this one takes
    before_bytes = _resident_bytes()
    try:
        text = library_text(spec, tokens.special_texts)
        template = Template(tokens, text)
        probe(tokens, template)
    except LibraryError as error:
        return Refused(explain(spec, error.words).message)
    except HeadraceError as error:
        return Refused(error.message)
    except MemoryError:
        return Refused("the grammar takes more memory than one may")
    except RecursionError:
        return Refused("the grammar is nested too deeply")
    give_back_free_memory()
    memory_bytes = _resident_bytes() - before_bytes
    del template
    return Passed(text, max(memory_bytes, 0))


def serve(frames: Frames) -> None:
    """Try what the parent sends, until it closes the socket."""
    setup = frames.receive(_SETUPS)
    tokens = MatcherTokens(setup.vocabulary)
    limit_bytes = setup.memory_bytes
    del setup
    # The first grammar makes the library build tables that it keeps, which are no grammar's own.
    try_grammar(tokens, GrammarSpec("json_schema", '{"type": "object"}', ""))
    give_back_free_memory()
    own_bytes = _resident_bytes()
    limit_bytes += _virtual_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    frames.send(Ready())
    _say_no_more()
    while True:
        verdict = try_grammar(tokens, frames.receive(_SPECS))
        give_back_free_memory()
        frames.send(msgspec.structs.replace(verdict, left_bytes=max(_resident_bytes() - own_bytes, 0)))


def main() -> None:
    """Entry of the child."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its parent tells it when to end
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=0)
    parent_pid = os.getppid()
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_serve_and_exit, args=(Frames(connection),), name="grammars", daemon=True).start()
    _wait_for_end(connection.fileno(), parent_pid)
    os._exit(0)


def _serve_and_exit(frames: Frames) -> None:
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


def _say_no_more() -> None:
    """From now on what libraries print, such as the words of a panic, could hold words of a request."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _resident_bytes() -> int:
    return _memory_pages(1) * resource.getpagesize()


def _virtual_bytes() -> int:
    return _memory_pages(0) * resource.getpagesize()


def _memory_pages(field: int) -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[field])


if __name__ == "__main__":
    main()
