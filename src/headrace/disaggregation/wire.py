"""Frames between a prefill and a decode server, over a TCP connection, and how it begins.

    magic | bytes of the message | bytes of the pages | checksum of both | message, in msgpack | pages

The prefill side says a random number first, and the decode side proves with it that it knows the secret, and asks for a proof with one of its own
(HMAC-SHA256, RFC 2104). Then they compare what KV depends on: servers that differ refuse one another with the difference. Nothing is encrypted. Both
sides say something every BEAT_S at least: who has heard nothing for SILENT_S takes the other for dead. No torch; used by threads of their own.
"""

import contextlib
import hashlib
import hmac
import math
import secrets
import socket
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from headrace.errors import ExecutionError
from headrace.messages.step import SUMMED_BYTES, Sums, sums_of

PROTOCOL = 3
BEAT_S = 0.4
SILENT_S = 1.5
_MAGIC = b"HRPD"
_PROLOGUE = struct.Struct("<4sIQI")
_MOST_UNKNOWN = 1 << 16
_MOST_KNOWN = 1 << 30
"""Bytes of a message or of pages, before and after the other side has proved that it knows the secret."""
_NONCE_BYTES = 32

T = TypeVar("T")


class Lost(ExecutionError):
    """The connection has ended, or what came over it is not what it should be."""


class Refused(ExecutionError):
    """The other side cannot be used, for a reason that a further attempt does not change."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The first frame, of the prefill side. replicas: how many there are; number r listens at the first one's port + r."""

    protocol: int
    nonce: bytes
    replicas: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The decode side's answer. proof: of the secret. facts: what its KV depends on, by name. memory: path of memory that both have, or empty."""

    nonce: bytes
    proof: bytes
    facts: dict[str, str]
    memory: str = ""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The prefill side's proof. page_bytes: of a page. facts: as in `Hello`. has_memory: pages go through `Hello.memory`."""

    proof: bytes
    page_bytes: int
    facts: dict[str, str]
    has_memory: bool = False


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Instead of `Welcome`: why not."""

    reason: str


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Send the pages of a room behind the first `num_known`. key: `prompt_key` of its prompt. again: the scheduler that asked before has died.

    number: of no other ask of the connection; what is said about the room from then on has it, since a room may be asked for twice.
    """

    room: int
    rid: str
    key: bytes
    num_known: int
    again: bool = False
    number: int = 0


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The decode side needs a room no more. number: of `Ask`; -1 = it has not asked, and will not."""

    room: int
    number: int


class Pages(msgspec.Struct, frozen=True, tag=True):
    """Pages first .. first + count - 1 of what was asked for: in the frame, or at byte `place` of the shared memory, with their checksum."""

    number: int
    first: int
    count: int
    place: int = -1
    checksum: int = 0


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The decode side has copied the oldest part out of the shared memory."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """All pages are sent. output: the first token, with all that belongs to it: a `TokenIDOut`, in msgpack."""

    number: int
    output: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """There are no more pages. is_wrong: the request is at fault."""

    number: int
    reason: str
    is_wrong: bool = False


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Says that the sender lives. progress: grows while it computes."""

    progress: int = 0


Message = Challenge | Hello | Welcome | Refusal | Ask | Leave | Pages | Taken | Done | Failed | Beat
_decoder = msgspec.msgpack.Decoder(Message)


class Connection:
    """A connected socket that frames go over. `send` from any thread; `receive` from one. trusts: the other side has proved that it may send much.
    until_s: when one that has not is lost (`time.monotonic`)."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SILENT_S)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        # Not in `close`: a thread that is about to wait for the socket has its number, which another socket could get then.
        weakref.finalize(self, sock.close)
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self.trusts = False
        self.until_s = math.inf

    def send(self, message: Message, data: memoryview | bytes = b"") -> None:
        """Raises Lost."""
        text, view = msgspec.msgpack.encode(message), memoryview(data).cast("B")
        crc = zlib.crc32(text, checksum(view))
        parts = [memoryview(_PROLOGUE.pack(_MAGIC, len(text), len(view), crc) + text), view]
        try:
            with self._sending:
                while parts:
                    sent = self._socket.sendmsg(parts)
                    while parts and sent >= len(parts[0]):
                        sent -= len(parts.pop(0))
                    if parts:
                        parts[0] = parts[0][sent:]
        except OSError as error:
            raise Lost(f"the connection has ended: {error.strerror or error}") from None

    def receive(self) -> tuple[Message, memoryview]:
        """The next frame; its pages are valid until the next call. Raises Lost."""
        magic, text_bytes, data_bytes, crc = _PROLOGUE.unpack(self._exactly(memoryview(bytearray(_PROLOGUE.size))))
        most = _MOST_KNOWN if self.trusts else _MOST_UNKNOWN
        if magic != _MAGIC or max(text_bytes, data_bytes) > most:
            raise Lost("the other side has an incompatible protocol")
        text = self._exactly(memoryview(bytearray(text_bytes)))
        if len(self._buffer) < data_bytes:
            self._buffer = bytearray(data_bytes)
        data = self._exactly(memoryview(self._buffer)[:data_bytes])
        if zlib.crc32(text, checksum(data)) != crc:
            raise Lost("a frame was damaged")
        try:
            return _decoder.decode(text), data
        except msgspec.MsgspecError:
            raise Lost("the other side has an incompatible protocol") from None

    def close(self) -> None:
        """Idempotent. A thread in `receive` or `send` ends with Lost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _exactly(self, view: memoryview) -> memoryview:
        place = 0
        try:
            while place < len(view):
                if not self.trusts and time.monotonic() > self.until_s:
                    raise Lost("the other side did not say in time who it is")
                count = self._socket.recv_into(view[place:])
                if not count:
                    raise Lost("the other side has closed the connection")
                place += count
        except OSError as error:
            raise Lost(f"the connection has ended: {error.strerror or error}") from None
        return view


class Facts:
    """What KV depends on (`PageTransfer.facts`), read once for the weights as they are. From any thread; `changed` never waits for who reads."""

    def __init__(self, read: Callable[[], dict[str, str]]) -> None:
        self._read = read
        self._reading = threading.Lock()
        self._known: tuple[int, dict[str, str]] | None = None
        self._number = 0

    def changed(self) -> None:
        self._number += 1

    def read(self) -> dict[str, str]:
        """The first call after a change may take seconds."""
        with self._reading:
            while self._known is None or self._known[0] != self._number:
                number = self._number
                self._known = number, self._read()
            return self._known[1]


def greet(
    connection: Connection, secret: bytes, facts: Mapping[str, str], page_bytes: int, replicas: int
) -> tuple[Hello, Welcome]:
    """The prefill side's part of the beginning, up to the `Welcome` that is still to be sent. Raises Lost or Refused."""
    connection.until_s = time.monotonic() + 2 * SILENT_S
    challenge = Challenge(PROTOCOL, secrets.token_bytes(_NONCE_BYTES), replicas)
    connection.send(challenge)
    hello = _expect(connection, Hello)
    if not hmac.compare_digest(hello.proof, _proof(secret, b"decode", challenge.nonce, hello.nonce)):
        connection.send(Refusal("its secret is another one"))
        raise Refused("a decode server has another secret")
    if text := difference(facts, hello.facts):
        connection.send(Refusal(text))
        raise Refused(f"a decode server has KV of another kind: {text}")
    connection.trusts = True
    return hello, Welcome(_proof(secret, b"prefill", hello.nonce, challenge.nonce), page_bytes, dict(facts))


def introduce(
    connection: Connection, secret: bytes, facts: Mapping[str, str], memory: str = ""
) -> tuple[Challenge, Welcome]:
    """The decode side's part of the beginning. Raises Lost or Refused."""
    challenge = _expect(connection, Challenge)
    if challenge.protocol != PROTOCOL:
        raise Refused(f"it speaks version {challenge.protocol} of the protocol, not {PROTOCOL}")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.send(Hello(nonce, _proof(secret, b"decode", challenge.nonce, nonce), dict(facts), memory))
    welcome = _expect(connection, Welcome)
    if not hmac.compare_digest(welcome.proof, _proof(secret, b"prefill", nonce, challenge.nonce)):
        raise Refused("its secret is another one")
    connection.trusts = True
    return challenge, welcome


def difference(prefill: Mapping[str, str], decode: Mapping[str, str]) -> str:
    """What KV depends on and two servers differ in, in words; empty if they can use each other's.

    Pages of a known layout may be of other sizes, with KV of another draft model or of none, and of other ranks if these have the weights of the same
    checkpoint.
    """
    differing = {name for name in {*prefill, *decode} if prefill.get(name) != decode.get(name)}
    if prefill.get("unit", "0") != "0":
        differing -= {"page", "draft", "draft_page"}
        differing -= {"ranks", "weights"} if "ranks" in differing else {"checkpoint"}
    else:
        differing -= {"checkpoint"}
    return ", ".join(
        f"{name}: {_shortened(prefill.get(name))} computes the prompt, {_shortened(decode.get(name))} goes on"
        for name in sorted(differing)
    )


def prompt_key(key: bytes, adapter: str) -> bytes:
    """Names a prompt between servers: 16 bytes. key: `PromptContent.cache_key`, of all its tokens. adapter: hash of its content, or empty."""
    return hashlib.blake2b(key + adapter.encode(), digest_size=16).digest()


def checksum(data: memoryview, sums: Sums | None = None) -> int:
    """Of pages: the CRC-32 of their sums, where these are known, and of what is left: as fast as reading them, unlike CRC-32 of all."""
    whole = len(data) // SUMMED_BYTES * SUMMED_BYTES
    if not whole:
        return zlib.crc32(data)
    return zlib.crc32(data[whole:], zlib.crc32((sums_of(data) if sums is None else sums).data))


def _expect(connection: Connection, kind: type[T]) -> T:
    message, _ = connection.receive()
    if isinstance(message, Refusal):
        raise Refused(message.reason)
    if not isinstance(message, kind):
        raise Lost("the other side has an incompatible protocol")
    return message


def _proof(secret: bytes, role: bytes, asked: bytes, own: bytes) -> bytes:
    return hmac.digest(secret, b" ".join((b"headrace", role, asked, own)), "sha256")


def _shortened(value: str | None) -> str:
    return "none" if value is None else value if len(value) <= 40 else f"{value[:12]}..."
