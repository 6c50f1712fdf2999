"""The group of ranks on several hosts: a star of TCP connections (ZeroMQ), from every follower to the leader's one port.

For a sum, the followers send theirs to the leader, which adds them in the order of ranks and sends all the same result. A call must get its
answers within a limit. A connection that carries nothing for SILENCE_S, not even a heartbeat from the I/O thread of the other side, is
closed: so a cut cable, a process that was stopped and one that died all show as a lost connection, also between calls. No connection is
made twice: when one is lost, the group is broken, the others are told, and all ranks make a new one.

Beside the calls, a rank sends hidden states to one of the next stage (`send_hidden`), through the leader unless one of the two is the
leader. They wait in a queue of their own, so they may come before, within and after any call.

Owns what both sides share, the keys by which they know each other, and the ends of such links; network_leader.py and network_follower.py are the
sides. One call at a time; `break_up`, `failure` and `close` may be called by any thread.
"""

import hashlib
import hmac
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import zmq
from zmq.utils import z85

from headrace.distributed.base import check_floats, check_rows, check_sum
from headrace.errors import ConfigError, ExecutionError
from headrace.messages.ranks import Broken, Ended, GroupNote, pack

SILENCE_S = 5.0
"""A connection on which nothing came for so long, heartbeats included, is lost."""
LOOK_S = 0.2
"""How often a wait looks whether the group is broken."""
_SIGN_OF_LIFE_S = 1.0
_LAST_WORDS_S = 1.0
"""How long an end may take to send what waits."""
_ENDING_S = 1.0
"""How long ZeroMQ may take to end its threads after that."""
_ZERO_COPY_BYTES = 64 << 10
MIN_SECRET_BYTES = 16
_ZAP = "inproc://zeromq.zap.01"
# scrypt (RFC 7914) makes guessing slow for whoever has recorded a connection. 16 MiB, about 50 ms.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**14, 8, 1

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
Socket: TypeAlias = zmq.Socket[bytes]
Floats: TypeAlias = npt.NDArray[np.float32]
Part: TypeAlias = bytes | memoryview | zmq.Frame
T = TypeVar("T")
_HEADER = struct.Struct("<BQ")
"""Before each frame: its kind, and the number of its call. Hidden states have the rank that they are for in place of a call."""
_SHAPE = struct.Struct("<II")


class Kind(IntEnum):
    NOTE = 0
    """A `GroupNote`, which belongs to no call."""
    SUM = 1
    GATHER = 2
    MESSAGE = 3
    READY = 4
    HIDDEN = 5
    """The shape of hidden states, which follow in a frame of their own. Belongs to no call."""


class Address(NamedTuple):
    """Where the leader listens. host: a name or a number."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Member(NamedTuple):
    """Who a process is in the group. rank: None = it only watches. facts: what must be the same in all, by the name that people know it by."""

    rank: int | None
    size: int
    facts: dict[str, str]


class Hidden(NamedTuple):
    """Hidden states that have come. values: their bytes, of float32[rows, columns]."""

    rows: int
    columns: int
    values: memoryview


class Lost(Exception):
    """The group cannot go on; why. Never leaves the group: its callers see an ExecutionError."""


class NetworkGroup(ABC):
    """A `Group`: `LeaderGroup` or `FollowerGroup`. Its calls raise ExecutionError when it is broken."""

    spans_hosts = True
    address = None
    """There is no native group, so the layers run one by one."""

    def __init__(self, context: Context, connection: Socket, rank: int, size: int, limit_s: float) -> None:
        """connection: owned from now on, with its context. limit_s: how long a call waits for another rank."""
        self.rank = rank
        self.size = size
        self._context = context
        self._socket = connection
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._num_calls = 0
        self._reason: str | None = None
        self._has_left = False
        self._hidden: deque[Hidden] = deque()

    def all_reduce(self, x: torch.Tensor) -> None:
        check_sum(x)
        values = x.detach().numpy().reshape(-1)
        self._call(lambda: self._sum(values))

    def gather(self, x: torch.Tensor, columns: Sequence[int], out: torch.Tensor | None) -> None:
        if len(columns) != self.size or min(columns) < 0:
            raise ValueError(f"gather: {list(columns)} columns for {self.size} ranks")
        if (out is None) != (self.rank > 0):
            raise ValueError(f"gather: an output for rank {self.rank}: {out is not None}")
        check_rows(x, x.shape[0], columns[self.rank])
        own, whole = x.detach().numpy(), None
        if out is not None:
            check_rows(out, x.shape[0], sum(columns))
            whole = out.detach().numpy()
        self._call(lambda: self._gather(own, columns, whole))

    def send_hidden(self, rank: int, hidden: torch.Tensor) -> None:
        """Send hidden states to a rank. See `Sender.send`."""
        rows, columns = hidden.shape
        shape = _HEADER.pack(Kind.HIDDEN, rank) + _SHAPE.pack(rows, columns)
        check_floats(hidden)
        values = bytes_of(hidden.detach().numpy())
        self._guard(lambda: self._send_on(rank, shape, values))

    def receive_hidden(self) -> Hidden:
        """The next hidden states for this rank; waits for them until the group breaks."""

        def act() -> Hidden:
            while not self._hidden:
                self._check_not_broken()
                self._wait_for_more()
            return self._hidden.popleft()

        return self._guard(act)

    def ready(self) -> None:
        """Of a follower only, so ValueError."""
        raise ValueError("the leader waits for the others")

    def receive(self) -> bytes:
        """Nobody sends to the leader, so ValueError."""
        raise ValueError("the leader receives no messages")

    @abstractmethod
    def wait_for_ranks(self, limit_s: float, check: Callable[[], None]) -> None: ...

    def wait_ready(self, check: Callable[[], None]) -> None:
        """Only the leader waits, so ValueError."""
        raise ValueError(f"rank {self.rank} waits for no rank")

    def send(self, message: bytes) -> None:
        """Only the leader sends, and never waits; so ValueError."""
        raise ValueError(f"rank {self.rank} sends no messages")

    def break_up(self, reason: str) -> None:
        """The first reason stays. Waits a moment, until the others have been told."""
        self._reason = self._reason or reason
        # A call that waits sees the reason and tells them itself.
        if self._lock.acquire(timeout=_LAST_WORDS_S):
            try:
                self._leave(Broken(self._reason))
            finally:
                self._lock.release()

    def failure(self) -> str | None:
        """Why the group is broken; None while it is not. Looks now, unless a call is under way, which does so itself."""
        if self._reason is None and self._lock.acquire(blocking=False):
            try:
                if not self._has_left:
                    self._look()
            except Lost as lost:
                self._give_up(str(lost))
            finally:
                self._lock.release()
        return self._reason

    def close(self) -> None:
        """Leave the group: later calls raise ExecutionError. Idempotent. What was sent still arrives."""
        with self._lock:
            self._leave(Ended())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _sum(self, values: Floats) -> None:
        """values: float32[n], becomes the sum. Raises Lost, as all of these may."""

    @abstractmethod
    def _gather(self, own: Floats, columns: Sequence[int], out: Floats | None) -> None: ...

    @abstractmethod
    def _send_on(self, rank: int, shape: Part, values: Part) -> None:
        """Send hidden states, in two frames, towards a rank. Does not wait."""

    @abstractmethod
    def _wait_for_more(self) -> None:
        """Handle what comes next, or look after LOOK_S whether the others can be reached."""

    @abstractmethod
    def _handle_next(self, timeout_s: float) -> bool:
        """Handle the next message, waiting for it if need be. False if none came."""

    def _handle_rest(self) -> None:
        while self._handle_next(0.0):
            pass

    @abstractmethod
    def _settle(self) -> None:
        """What is to be done before others may use the connections."""

    @abstractmethod
    def _look(self) -> None:
        """Handle what has come, and look whether the others can be reached. Does not wait."""

    @abstractmethod
    def _leave_with(self, note: GroupNote) -> None:
        """Say a last word to everyone who can be reached, without waiting, and let go of all but the connection."""

    def _call(self, act: Callable[[], T]) -> T:
        def call() -> T:
            self._num_calls += 1
            return act()

        return self._guard(call)

    def _guard(self, act: Callable[[], T]) -> T:
        """Do something with the connections to the others. Raises ExecutionError when the group is broken."""
        with self._lock:
            if self._has_left:
                if self._reason is None:
                    raise ExecutionError(f"rank {self.rank} has left its group")
                raise ExecutionError(f"the group of ranks is broken: {self._reason}")
            try:
                self._check_not_broken()
                result = act()
                self._settle()
                return result
            except Lost as lost:
                self._give_up(str(lost))
                raise ExecutionError(f"the group of ranks is broken: {self._reason}") from None

    def _give_up(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._leave(Broken(self._reason))

    def _leave(self, last_words: GroupNote) -> None:
        if not self._has_left:
            self._has_left = True
            self._leave_with(last_words)
            end(self._context, self._socket)

    def _check_not_broken(self) -> None:
        if self._reason is not None:
            raise Lost(self._reason)

    def _frame(self, kind: Kind, payload: bytes | memoryview) -> bytes:
        """A part of the current call."""
        return b"".join((_HEADER.pack(kind, self._num_calls), payload))

    def _payload(self, frame: memoryview, kind: Kind, sender: int, num_bytes: int | None = None) -> memoryview:
        """What a frame of the current call holds. num_bytes: how much it must be."""
        its_kind, its_call = _HEADER.unpack_from(frame)
        payload = frame[_HEADER.size :]
        if (its_kind, its_call) != (kind, self._num_calls) or num_bytes not in (None, payload.nbytes):
            raise Lost(
                f"rank {sender} sent call {its_call} of kind {its_kind} with {payload.nbytes} bytes "
                f"to rank {self.rank}, which is at call {self._num_calls} of kind {kind}"
            )
        return payload


@dataclass(frozen=True, slots=True)
class NetworkSender:
    """The sending end of a link between two stages on different hosts, through the connections of their group. rank: the receiver's number."""

    group: NetworkGroup
    rank: int

    def send(self, hidden: torch.Tensor) -> None:
        """It is not copied here: ZeroMQ's thread sends it from where it lies."""
        self.group.send_hidden(self.rank, hidden)

    def close(self) -> None:
        """The connection is the group's."""


@dataclass(frozen=True, slots=True)
class NetworkReceiver:
    """The receiving end. A rank has one, since only the stage before it sends to it."""

    group: NetworkGroup

    def receive(self, rows: int) -> torch.Tensor:
        """Waits as long as the group is whole."""
        found = self.group.receive_hidden()
        if found.rows != rows:
            raise ExecutionError(f"the stage before sent {found.rows} rows in place of {rows}")
        # Copied because a frame may begin anywhere, and kernels want their tensors aligned.
        hidden = torch.empty(rows, found.columns)
        bytes_of(hidden.numpy())[:] = found.values
        return hidden

    def close(self) -> None:
        """The connection is the group's."""


def note_frame(note: GroupNote) -> bytes:
    return _HEADER.pack(Kind.NOTE, 0) + pack(note)


def note_of(frame: memoryview) -> memoryview | None:
    """The bytes of a note; None if the frame is part of a call. Raises Lost if it is neither."""
    if frame.nbytes < _HEADER.size:
        raise Lost(f"a frame of {frame.nbytes} bytes came, which is no message between ranks")
    return frame[_HEADER.size :] if frame[0] == Kind.NOTE else None


def hidden_of(frames: Sequence[memoryview]) -> tuple[int, Hidden] | None:
    """Hidden states and the rank that they are for; None if the frames hold something else. Raises Lost if they do not fit each other."""
    if frames[0].nbytes < _HEADER.size or frames[0][0] != Kind.HIDDEN:
        return None
    shape, *rest = frames
    if shape.nbytes == _HEADER.size + _SHAPE.size and len(rest) == 1:
        _, rank = _HEADER.unpack_from(shape)
        rows, columns = _SHAPE.unpack_from(shape, _HEADER.size)
        if rest[0].nbytes == rows * columns * 4:
            return rank, Hidden(rows, columns, rest[0])
    raise Lost(f"hidden states came in frames of {', '.join(str(frame.nbytes) for frame in frames)} bytes")


def only(frames: Sequence[memoryview]) -> memoryview:
    """The frame of a note or of a call. Raises Lost if there are several."""
    if len(frames) > 1:
        raise Lost("a message of several frames came, which is none between ranks")
    return frames[0]


def send_message(connection: Socket, *frames: Part) -> None:
    """Send a message without waiting. Large frames are not copied, so nobody may write to them afterwards. Raises zmq.ZMQError."""
    for left, frame in zip(reversed(range(len(frames))), frames, strict=True):
        flags = zmq.NOBLOCK | zmq.SNDMORE if left else zmq.NOBLOCK
        connection.send(frame, flags, copy=len(frame) < _ZERO_COPY_BYTES)


def new_socket(context: Context, kind: int) -> Socket:
    """A socket whose connections end when the other side is silent."""
    made = context.socket(kind)
    made.set(zmq.IPV6, 1)
    made.set(zmq.SNDHWM, 0)
    made.set(zmq.RCVHWM, 0)
    made.set(zmq.HEARTBEAT_IVL, int(_SIGN_OF_LIFE_S * 1000))
    made.set(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
    made.set(zmq.HEARTBEAT_TTL, int(SILENCE_S * 1000))
    return made


def endpoint(address: Address) -> str:
    """As ZeroMQ wants it: with the number of a host, not its name. Raises ConfigError if the name is not known."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--dist-init-addr {address}: the host is not known ({error.strerror})") from None
    number = found[0][4][0]
    return f"tcp://[{number}]:{address.port}" if ":" in str(number) else f"tcp://{number}:{address.port}"


def end(context: Context, connection: Socket) -> None:
    """Close a socket and its context; what waits is sent, for a moment.

    ZeroMQ has been seen not to come to its end where a stranger was connected. Nobody waits for it longer, so that a process can leave.
    """
    connection.close(linger=int(_LAST_WORDS_S * 1000))
    ending = threading.Thread(target=context.term, name="end-of-network", daemon=True)
    ending.start()
    ending.join(_LAST_WORDS_S + _ENDING_S)


def bytes_of(values: Floats) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


def floats(payload: memoryview) -> Floats:
    """The values of a payload, which may not be written."""
    return np.frombuffer(payload, np.float32)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """public, secret: as ZeroMQ writes keys, 40 characters of Z85."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """Of the leader, and of all who connect to it."""

    leader: KeyPair
    others: KeyPair


def group_keys(secret: bytes) -> GroupKeys:
    """The keys of a group whose processes share `secret`, at least MIN_SECRET_BYTES.

    ZeroMQ's CURVE (https://rfc.zeromq.org/spec/26/) encrypts and authenticates with a pair of keys on each side. Both pairs come from the secret,
    so whoever has the secret has all four, and nobody else can connect, listen or take the leader's place.
    """
    assert len(secret) >= MIN_SECRET_BYTES, len(secret)
    derived = hashlib.scrypt(
        secret, salt=b"headrace ranks 1", n=_SCRYPT_N, r=_SCRYPT_R, p=_SCRYPT_P, maxmem=64 << 20, dklen=64
    )
    return GroupKeys(_pair(derived[:32]), _pair(derived[32:]))


def _pair(raw: bytes) -> KeyPair:
    secret: bytes = z85.encode(raw)
    return KeyPair(zmq.curve_public(secret), secret)


def admit_only(context: Context, public: bytes) -> None:
    """Let only the holder of this key connect to the sockets of a context, until the context ends (https://rfc.zeromq.org/spec/27/).

    Without it, CURVE lets in whoever knows the leader's public key.
    """
    handler = context.socket(zmq.REP)
    handler.bind(_ZAP)
    threading.Thread(target=_answer, args=(handler, z85.decode(public)), name="rank keys", daemon=True).start()


def _answer(handler: Socket, public: bytes) -> None:
    try:
        while True:
            version, request, _, _, _, mechanism, *credentials = handler.recv_multipart()
            is_known = mechanism == b"CURVE" and hmac.compare_digest(b"".join(credentials), public)
            status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
            handler.send_multipart([version, request, *status, b"", b""])
    except zmq.ContextTerminated:
        handler.close(linger=0)
