"""The other side of a group over the network: one connection to the leader, of a rank or of a process that only watches."""

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from headrace.distributed.network import (
    LOOK_S,
    SILENCE_S,
    Address,
    Context,
    Floats,
    GroupKeys,
    Kind,
    Lost,
    Member,
    NetworkGroup,
    Part,
    Socket,
    bytes_of,
    end,
    endpoint,
    floats,
    group_keys,
    hidden_of,
    new_socket,
    note_frame,
    note_of,
    only,
    send_message,
)
from headrace.errors import ConfigError, ExecutionError
from headrace.log import get_logger
from headrace.messages.ranks import Broken, Ended, GroupNote, Hello, Refused, Welcome, unpack_note

logger = get_logger(__name__)

_RETRY_S = 0.25
_CONNECT_S = 3.0
_HANDSHAKE_S = 5.0
_FAILING_S = 20.0
"""Handshakes that fail for so long will not work later. A leader may just end, and a proxy may accept connections before there is one."""
_GONE = f"the connection to rank 0 is lost: its process has ended, or nothing came from it for {SILENCE_S:g} s"
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class FollowerGroup(NetworkGroup):
    """Made by `join`. One that only watches may only call `failure`, `break_up` and `close`."""

    def __init__(self, link: "_Link", member: Member, limit_s: float) -> None:
        super().__init__(
            link.context, link.connection, -1 if member.rank is None else member.rank, member.size, limit_s
        )
        self.has_ended = False
        """Whether the leader has ended without an error. Known after `failure`."""
        self._link = link
        self._arrived: deque[memoryview] = deque()

    @classmethod
    def join(
        cls,
        address: Address,
        secret: bytes,
        member: Member,
        limit_s: float,
        join_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> Self:
        """Connect to the leader and wait until all ranks have.

        address: the leader's. limit_s: how long a call waits for the leader. join_s: how long this may take. check: called now and then; what
        it raises ends the wait. Raises ConfigError if the leader refuses, ExecutionError if the group is not whole after join_s.
        """
        keys = group_keys(secret)
        end_s = time.monotonic() + join_s
        tries = _Tries(address)
        while True:
            link = _Link.connect(address, keys, tries)
            if link is not None:
                try:
                    if _is_welcome(link, member, end_s, check):
                        return cls(link, member, limit_s)
                except BaseException:
                    link.close()
                    raise
                link.close()
            check()
            if time.monotonic() > end_s:
                raise ExecutionError(
                    f"the group of ranks at --dist-init-addr {address} was not whole after {join_s:g} s: {tries.last}"
                )
            time.sleep(_RETRY_S)

    def ready(self) -> None:
        self._call(lambda: self._give(Kind.READY, b""))

    def wait_for_ranks(self, limit_s: float, check: Callable[[], None]) -> None:
        """`join` has waited."""

    def receive(self) -> bytes:
        return self._call(lambda: bytes(self._answer(Kind.MESSAGE, None, None)))

    def _sum(self, values: Floats) -> None:
        self._give(Kind.SUM, bytes_of(values))
        values[:] = floats(self._answer(Kind.SUM, values.nbytes, self._limit_s))

    def _gather(self, own: Floats, columns: Sequence[int], out: Floats | None) -> None:
        self._give(Kind.GATHER, own.tobytes())

    def _give(self, kind: Kind, payload: bytes | memoryview) -> None:
        """Send a part of the current call. If the connection is lost, the next answer does not come."""
        send_message(self._socket, self._frame(kind, payload))

    def _answer(self, kind: Kind, num_bytes: int | None, limit_s: float | None) -> memoryview:
        """What the leader gives to the current call. limit_s: None = it may take as long as it likes."""
        begin_s = time.monotonic()
        while not self._arrived:
            self._check_not_broken()
            if not self._handle_next(LOOK_S) and limit_s is not None and time.monotonic() - begin_s > limit_s:
                raise Lost(f"rank 0 did not answer within {limit_s:g} s")
        return self._payload(self._arrived.popleft(), kind, 0, num_bytes)

    def _send_on(self, rank: int, shape: Part, values: Part) -> None:
        self._handle_rest()  # a connection that is lost takes what is sent, too
        send_message(self._socket, shape, values)

    def _wait_for_more(self) -> None:
        self._handle_next(LOOK_S)

    def _handle_next(self, timeout_s: float) -> bool:
        """Raises Lost if the leader says so, or cannot be reached."""
        # What it sent before it was lost comes first.
        was_cut = self._link.is_cut
        frames = self._link.receive(timeout_s)
        if not frames:
            if was_cut:
                raise Lost(_GONE)
            return False
        hidden = hidden_of(frames)
        if hidden is not None:
            self._hidden.append(hidden[1])
        elif (note := note_of(only(frames))) is not None:
            self._handle(_decoded(note))
        else:
            self._arrived.append(frames[0])
        return True

    def _handle(self, note: GroupNote) -> None:
        match note:
            case Broken(reason):
                raise Lost(reason)
            case Ended():
                self.has_ended = True
                raise Lost("rank 0 has ended")
            case _:
                pass

    def _settle(self) -> None:
        """A rank has one thread that makes calls."""

    def _look(self) -> None:
        # A rank is called by the leader, and looks when it is; a frame that comes now would be lost.
        if self.rank < 0:
            self._handle_rest()

    def _leave_with(self, note: GroupNote) -> None:
        # One that leaves in peace is missed only if more is asked of it.
        if not self._link.is_cut:
            with contextlib.suppress(zmq.ZMQError):
                send_message(self._socket, note_frame(note))
        self._link.stop_watching()


@dataclass(slots=True)
class _Tries:
    """How joining goes. last: why the last try failed. failing_since_s: when handshakes began to fail; None = the last did not."""

    address: Address
    last: str = ""
    failing_since_s: float | None = None

    def failed(self, why: str) -> None:
        """Note why a try has failed. The first of its kind is logged."""
        if why != self.last:
            logger.warning("cannot join the ranks at %s yet: %s", self.address, why)
        self.last = why


class _Link:
    """A connection to the leader that is never made twice. is_cut: it has been lost."""

    def __init__(self, context: Context, connection: Socket) -> None:
        self.context = context
        self.connection = connection
        self.is_cut = False
        self._monitor: Socket = connection.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(connection, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    @classmethod
    def connect(cls, address: Address, keys: GroupKeys, tries: _Tries) -> Self | None:
        """None if it does not work now. Raises ConfigError if it will never."""
        try:
            where = endpoint(address)
        except ConfigError as error:  # names come late where a leader has just been started
            tries.failed(error.message)
            return None
        context: Context = zmq.Context()
        connection = new_socket(context, zmq.DEALER)
        connection.set(zmq.RECONNECT_IVL, -1)
        connection.set(zmq.CONNECT_TIMEOUT, int(_CONNECT_S * 1000))
        connection.set(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_S * 1000))
        connection.set(zmq.CURVE_SERVERKEY, keys.leader.public)
        connection.set(zmq.CURVE_PUBLICKEY, keys.others.public)
        connection.set(zmq.CURVE_SECRETKEY, keys.others.secret)
        link = cls(context, connection)
        connection.connect(where)
        try:
            if link._has_connected(tries):
                return link
        except BaseException:
            link.close()
            raise
        link.close()
        return None

    def _has_connected(self, tries: _Tries) -> bool:
        end_s = time.monotonic() + _CONNECT_S + _HANDSHAKE_S
        is_connected = False
        while (left_s := end_s - time.monotonic()) > 0:
            if not self._monitor.poll(int(left_s * 1000)):
                break
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                tries.failing_since_s = None
                return True
            if event == zmq.EVENT_CONNECTED:
                is_connected = True
            else:
                break
        if not is_connected:
            tries.failing_since_s = None
            tries.failed("nothing listens there")
            return False
        tries.failed("its secret differs, or it is not Headrace")
        now = time.monotonic()
        if tries.failing_since_s is None:
            tries.failing_since_s = now
        if now - tries.failing_since_s >= _FAILING_S:
            raise ConfigError(
                f"--dist-init-addr {tries.address}: {tries.last}; give every node the same secret "
                "(HEADRACE_DIST_SECRET or --dist-secret-file)"
            )
        return False

    def receive(self, timeout_s: float) -> list[memoryview]:
        """The frames of the next message; none if none came in this time, or the connection was lost."""
        try:
            frames = self.connection.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            ready = dict(self._poller.poll(0 if self.is_cut else int(timeout_s * 1000)))
            if self._monitor in ready:
                self.is_cut |= recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED
            if self.connection not in ready:
                return []
            frames = self.connection.recv_multipart(zmq.NOBLOCK, copy=False)
        return [frame.buffer for frame in frames]

    def stop_watching(self) -> None:
        """Let go of all but the connection."""
        self.connection.disable_monitor()
        self._monitor.close(linger=0)

    def close(self) -> None:
        self.stop_watching()
        end(self.context, self.connection)


def _is_welcome(link: _Link, member: Member, end_s: float, check: Callable[[], None]) -> bool:
    """Wait for the answer to a Hello. False if it is worth another try. Raises ConfigError if the leader refuses."""
    send_message(link.connection, note_frame(Hello(member.rank, member.size, socket.gethostname(), member.facts)))
    while time.monotonic() < end_s and not link.is_cut:
        check()
        frames = link.receive(LOOK_S)
        note = note_of(only(frames)) if frames else None
        match None if note is None else _decoded(note):
            case Welcome():
                return True
            case Refused(reason, for_now=True):
                logger.warning("node 0 does not want this process yet: %s", reason)
                return False
            case Refused(reason):
                raise ConfigError(f"node 0 refuses this process: {reason}")
            case Broken() | Ended():
                return False
            case _:
                pass
    return False


def _decoded(note: memoryview) -> GroupNote:
    try:
        return unpack_note(note)
    except msgspec.DecodeError as error:
        raise Lost(f"a note came that this version does not know: {error}") from error
