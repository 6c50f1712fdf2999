"""The leader's side of a group over the network: it listens, decides who joins, and adds up."""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import msgspec
import zmq

from headrace.distributed.network import (
    LOOK_S,
    SILENCE_S,
    Address,
    Context,
    Floats,
    Kind,
    Lost,
    Member,
    NetworkGroup,
    Part,
    Socket,
    admit_only,
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
from headrace.messages.ranks import (
    Broken,
    Ended,
    GroupNote,
    Hello,
    Refused,
    Welcome,
    difference,
    unpack_note,
)

logger = get_logger(__name__)

_STILL_HERE = note_frame(Welcome())
"""Sent to learn whether a rank can be reached. Ignored by who is in the group."""
_FULL = Refused("the group already has all of its ranks, which start and end together", for_now=True)


class LeaderGroup(NetworkGroup):
    """Made by `listen`. `wait_for_ranks` comes before every call.

    What followers send to each other is passed on by whichever thread uses the socket, and by one of the group's own while none does.
    """

    def __init__(self, context: Context, router: Socket, member: Member, limit_s: float) -> None:
        super().__init__(context, router, 0, member.size, limit_s)
        self._facts = member.facts
        self._connections: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._hosts: dict[int, str] = {}
        self._watchers: set[bytes] = set()
        self._left: set[int] = set()  # ranks that have ended, and not been lost
        self._is_whole = False
        self._arrived: list[deque[memoryview]] = [deque() for _ in range(member.size)]

    @classmethod
    def listen(cls, address: Address, secret: bytes, member: Member, limit_s: float) -> Self:
        """Listen for the followers. address: of this machine. limit_s: how long a call waits for another rank.

        Raises ConfigError if it cannot listen there.
        """
        where, keys = endpoint(address), group_keys(secret)
        context: Context = zmq.Context()
        router = new_socket(context, zmq.ROUTER)
        try:
            admit_only(context, keys.others.public)
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_SECRETKEY, keys.leader.secret)
            router.set(zmq.ROUTER_MANDATORY, 1)
            router.bind(where)
        except zmq.ZMQError as error:
            end(context, router)
            raise ConfigError(f"--dist-init-addr {address}: node 0 cannot listen there: {error.strerror}") from None
        return cls(context, router, member, limit_s)

    @property
    def port(self) -> int:
        return int(self._socket.get(zmq.LAST_ENDPOINT).rpartition(b":")[2].rstrip(b"\0"))

    def wait_for_ranks(self, limit_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank has joined. check: called now and then; what it raises ends the wait.

        Raises ExecutionError that names the missing ranks after limit_s.
        """
        end_s = time.monotonic() + limit_s
        with self._lock:
            while not self._welcome_all():
                check()
                self._check_not_broken()
                self._handle_next(LOOK_S)
                if time.monotonic() > end_s:
                    reason = f"rank {', '.join(map(str, self._missing()))} did not join within {limit_s:g} s"
                    self._give_up(reason)
                    raise ExecutionError(f"{reason}; start every node, with the same --dist-init-addr")

    def pass_on(self) -> None:
        """From now on, pass on what followers send to each other while the leader makes no calls, too. Called once."""
        with self._lock:
            come = os.dup(self._socket.get(zmq.FD))  # also readable after the socket is closed
        threading.Thread(target=self._pass_on, args=(come,), name="rank relay", daemon=True).start()

    def _pass_on(self, come: int) -> None:
        """come: readable when something may have come since the socket was used last (https://libzmq.readthedocs.io/, ZMQ_FD)."""
        poll = select.poll()
        poll.register(come, select.POLLIN)
        while not self._has_left:
            poll.poll(int(LOOK_S * 1000))
            with contextlib.suppress(ExecutionError):  # the next call says it, too
                self._guard(lambda: None)
        os.close(come)

    def wait_ready(self, check: Callable[[], None]) -> None:
        """All followers count, those of this host, too."""
        self._call(lambda: self._collect(Kind.READY, None, None, check))

    def send(self, message: bytes) -> None:
        self._call(lambda: self._send_to(self._connections, self._frame(Kind.MESSAGE, message)))

    def _sum(self, values: Floats) -> None:
        for part in self._collect(Kind.SUM, [values.nbytes] * self.size, self._limit_s):
            values += floats(part)
        self._send_to(self._connections, self._frame(Kind.SUM, bytes_of(values)))

    def _gather(self, own: Floats, columns: Sequence[int], out: Floats | None) -> None:
        assert out is not None
        out[:, : columns[0]] = own
        begin = columns[0]
        sizes = [len(own) * n * 4 for n in columns]
        for part, n in zip(self._collect(Kind.GATHER, sizes, self._limit_s), columns[1:], strict=True):
            out[:, begin : begin + n] = floats(part).reshape(len(own), n)
            begin += n

    def _collect(
        self,
        kind: Kind,
        num_bytes: Sequence[int] | None,
        limit_s: float | None,
        check: Callable[[], None] = lambda: None,
    ) -> list[memoryview]:
        """What each follower gives to the current call, in the order of ranks. num_bytes: how much, by rank. limit_s: None = no limit."""
        begin_s = time.monotonic()
        while late := [rank for rank in range(1, self.size) if not self._arrived[rank]]:
            self._check_not_broken()
            if self._handle_next(LOOK_S):
                continue
            check()
            self._send_to(late, _STILL_HERE)
            if limit_s is not None and time.monotonic() - begin_s > limit_s:
                raise Lost(f"{self._who(late[0])} did not answer within {limit_s:g} s")
        return [
            self._payload(self._arrived[rank].popleft(), kind, rank, None if num_bytes is None else num_bytes[rank])
            for rank in range(1, self.size)
        ]

    def _send_on(self, rank: int, shape: Part, values: Part) -> None:
        self._send_to([rank], shape, values)

    def _wait_for_more(self) -> None:
        if not self._handle_next(LOOK_S):
            self._send_to(self._connections, _STILL_HERE)

    def _settle(self) -> None:
        # Whoever uses the socket may take away the sign that something has come, for which `_pass_on` waits.
        self._handle_rest()

    def _look(self) -> None:
        self._handle_rest()  # a last word of a rank comes before its loss
        if self._is_whole:
            for rank in self._connections.keys() - self._left:
                if not self._send(self._connections[rank], _STILL_HERE):
                    self._handle_rest()
                    if rank not in self._left:
                        raise self._lost(rank)
        self._settle()

    def _handle_next(self, timeout_s: float) -> bool:
        try:
            connection, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if timeout_s > 0 and self._socket.poll(int(timeout_s * 1000)):
                return self._handle_next(0.0)
            return False
        buffers = [frame.buffer for frame in frames]
        hidden = hidden_of(buffers)
        if hidden is None:
            self._handle(bytes(connection.buffer), only(buffers))
        elif bytes(connection.buffer) in self._ranks:
            rank, states = hidden
            if rank == 0:
                self._hidden.append(states)
            elif rank in self._connections:
                self._send_on(rank, *frames)
            else:
                raise Lost(f"hidden states came for rank {rank} of {self.size}")
        return True

    def _handle(self, connection: bytes, frame: memoryview) -> None:
        note, rank = note_of(frame), self._ranks.get(connection)
        if note is None:
            if rank is not None:
                self._arrived[rank].append(frame)
            return
        try:
            decoded = unpack_note(note)
        except msgspec.DecodeError:
            self._say(connection, Refused("incompatible Headrace version"))
            return
        match decoded:
            case Hello(rank=None):
                self._watchers.add(connection)
                if self._is_whole:
                    self._say(connection, Welcome())
            case Hello():
                self._say_hello(connection, decoded)
            case Broken(reason) if rank is not None:
                raise Lost(f"{self._who(rank)}: {reason}")
            case Ended() if rank is not None:
                self._left.add(rank)
            case _:
                pass

    def _say_hello(self, connection: bytes, hello: Hello) -> None:
        """Take a follower in, or say why not."""
        rank = hello.rank
        assert rank is not None
        if self._is_whole:
            self._say(connection, _FULL)
            return
        reason = difference(self._facts, hello.facts)
        if hello.size != self.size or not 0 < rank < self.size:
            reason = f"it is rank {rank} of {hello.size}, in a group of {self.size}"
        if reason:
            logger.warning("rank %d on %s cannot join: %s", rank, hello.host, reason)
            self._say(connection, Refused(f"it differs from node 0: {difference(hello.facts, self._facts) or reason}"))
            return
        before = self._connections.get(rank)
        if before is not None:
            del self._ranks[before]  # it has tried again
        self._connections[rank] = connection
        self._ranks[connection] = rank
        self._hosts[rank] = hello.host
        logger.info("rank %d on %s has joined; %d of %d ranks", rank, hello.host, len(self._ranks) + 1, self.size)

    def _welcome_all(self) -> bool:
        """Tell everybody if the group is whole. False if it is not."""
        if self._missing():
            return False
        gone = [rank for rank, connection in self._connections.items() if not self._say(connection, Welcome())]
        for rank in gone:
            logger.warning("%s has gone before all were there", self._who(rank))
            del self._ranks[self._connections.pop(rank)]
        if gone:
            # The others are told twice; they ignore it.
            return False
        self._is_whole = True
        for watcher in self._watchers:
            self._say(watcher, Welcome())
        return True

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self.size) if rank not in self._connections]

    def _send_to(self, ranks: Iterable[int], *frames: Part) -> None:
        for rank in ranks:
            if not self._send(self._connections[rank], *frames):
                raise self._lost(rank)

    def _lost(self, rank: int) -> Lost:
        return Lost(f"{self._who(rank)} is lost: its process has ended, or nothing came from it for {SILENCE_S:g} s")

    def _say(self, connection: bytes, note: GroupNote) -> bool:
        return self._send(connection, note_frame(note))

    def _send(self, connection: bytes, *frames: Part) -> bool:
        """False if the connection is lost."""
        try:
            self._socket.send(connection, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise Lost(f"rank 0 cannot send: {error.strerror}") from error
        send_message(self._socket, *frames)
        return True

    def _leave_with(self, note: GroupNote) -> None:
        with contextlib.suppress(Lost):
            for connection in (*self._connections.values(), *self._watchers):
                self._say(connection, note)

    def _who(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}" if rank in self._hosts else f"rank {rank}"
