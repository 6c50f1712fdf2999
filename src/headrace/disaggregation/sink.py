"""The decode side: connections to prefill servers, and the rooms that it asks them for.

Owns the threads that connect, ask and write pages into the pool, one pair for each address, and how pages of other sizes and ranks become its own
(`Layout`). Owns no page: whoever asks for a room holds the pages
until it is done or withdrawn. A room whose server cannot be reached, or is lost, is done with a failure at once.
"""

import contextlib
import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.disaggregation import wire
from headrace.disaggregation.shared_memory import Ring
from headrace.log import get_logger
from headrace.messages.outputs import TokenIDOut
from headrace.messages.step import PageTransfer

_logger = get_logger(__name__)

CONNECT_S = 1.0
"""How long a prefill server may take to accept a connection."""

IDLE_S = 300.0
"""A connection without rooms is closed after so long."""

_MOST_PEERS = 256

_read_output = msgspec.msgpack.Decoder(TokenIDOut)


@dataclass(eq=False, slots=True)
class Incoming:
    """A room of a prefill server. key, again: see `wire.Ask`. first: see `Room`. replica: of that server, -1 = `first` modulo how many
    num_known: pages at the beginning of the prompt that need not come. pages: where to put those behind them.

    num_tokens: of the prompt. num_arrived: of `pages`, in order. num_came: pages of the other side; rest: what of them is in no page of ours yet.
    output: of the prefill server, once all has come. failure: why it does not come; is_wrong: because the request, or the server that it names, is
    not what it should be. num_news: grows while the other side works. is_wanted: set to False to end it (`PageSink.withdraw`). is_done: has output or
    failure.
    """

    host: str
    port: int
    room: int
    rid: str
    key: bytes
    first: int = 0
    replica: int = -1
    num_known: int = 0
    pages: list[int] = field(default_factory=list)
    again: bool = False
    num_tokens: int = 0
    num_arrived: int = 0
    num_came: int = 0
    rest: "Rows | None" = None
    output: TokenIDOut | None = None
    failure: str = ""
    is_wrong: bool = False
    num_news: int = 0
    is_wanted: bool = True
    is_done: bool = False


Rows = npt.NDArray[np.uint8]
"""KV of units of tokens: [units, bytes], those of [layers, 2 for K and V, heads] and then of a draft model's [layers, 2]."""


class Layout(NamedTuple):
    """What lies where in a page, by `PageTransfer.facts`: of each rank its part, with K, then V of each layer: of each unit of tokens, its heads.
    Then likewise of a draft model, all of whose heads one rank has.

    page: tokens. unit: tokens of which the KV of a head lies together. parts: of each rank the first layer, the end, the first head, the end.
    draft: names what the draft model's KV depends on, empty without; draft_layers: of it; draft_bytes: of its part of a page.
    """

    page: int
    unit: int
    parts: tuple[tuple[int, int, int, int], ...]
    draft: str = ""
    draft_layers: int = 0
    draft_bytes: int = 0

    @classmethod
    def of(cls, facts: Mapping[str, str]) -> "Layout":
        draft_layers, draft_bytes = json.loads(facts.get("draft_page", "[0, 0]"))
        parts = tuple(map(tuple, json.loads(facts["ranks"])))
        return cls(int(facts["page"]), int(facts["unit"]), parts, facts.get("draft", ""), draft_layers, draft_bytes)

    @property
    def units(self) -> int:
        return self.page // self.unit

    @property
    def draft_unit_bytes(self) -> int:
        return self.draft_bytes // self.units

    @property
    def cells(self) -> int:
        """How often a page has K or V of one unit, layer and head, but for the draft model's."""
        return 2 * self.units * sum((end - first) * (last - head) for first, end, head, last in self.parts)

    @property
    def _shape(self) -> tuple[int, int, int]:
        """Layers, 2 and heads of a unit."""
        _, num_layers, _, num_heads = map(max, zip(*self.parts, strict=True))
        return num_layers, 2, num_heads

    def rows(self, data: memoryview, count: int) -> Rows:
        """The units of so many pages, in order."""
        pages = np.frombuffer(data, np.uint8).reshape(count, -1)
        size = (pages.shape[1] - self.draft_bytes) // self.cells
        rows = np.empty((count * self.units, math.prod(self._shape) * size + self.draft_unit_bytes), np.uint8)
        for in_pages, in_rows in self._views(pages, rows, size):
            in_rows[:] = in_pages
        return rows

    def pages(self, rows: Rows) -> memoryview:
        """The bytes of whole pages of these units."""
        size = (rows.shape[1] - self.draft_unit_bytes) // math.prod(self._shape)
        pages = np.empty((len(rows) // self.units, self.cells * size + self.draft_bytes), np.uint8)
        for in_pages, in_rows in self._views(pages, rows, size):
            in_pages[:] = in_rows
        return pages.reshape(-1).data

    def _views(self, pages: npt.NDArray[np.uint8], rows: Rows, size: int) -> Iterator[tuple[Rows, Rows]]:
        """Of each rank, and of the draft model: its part of pages uint8[count, bytes] and of their rows, [count, units, layers, 2, heads, size]."""
        own = rows.shape[1] - self.draft_unit_bytes
        of_units = rows[:, :own].reshape(len(pages), self.units, *self._shape, size)
        start = 0
        for first, end, head, last in self.parts:
            shape = end - first, 2, self.units, last - head, size
            part = pages[:, start : (start := start + math.prod(shape))].reshape(len(pages), *shape)
            yield part.transpose(0, 3, 1, 2, 4, 5), of_units[:, :, first:end, :, head:last]
        if self.draft_bytes:
            size = self.draft_unit_bytes // (2 * self.draft_layers)
            part = pages[:, start:].reshape(len(pages), self.draft_layers, 2, self.units, 1, size)
            of_units = rows[:, own:].reshape(len(pages), self.units, self.draft_layers, 2, 1, size)
            yield part.transpose(0, 3, 1, 2, 4, 5), of_units


class PageSink:
    """See the module docstring. secret: that both sides know. uses_memory: pages of servers on this machine come through memory that both have.
    allows: whether to connect to an address that a host has (`PrefillHosts.allows`).

    Counts since the start: num_pages and num_bytes that came.
    """

    def __init__(
        self,
        transfer: PageTransfer,
        secret: bytes,
        uses_memory: bool = False,
        allows: Callable[[str, str], bool] = lambda host, address: True,
    ) -> None:
        self.transfer = transfer
        self.secret = secret
        self.uses_memory = uses_memory
        self.allows = allows
        self.wake = threading.Condition()
        self.copying = threading.Lock()
        self.peers: dict[tuple[str, int, int], _Peer] = {}
        self.facts = wire.Facts(lambda: self.transfer.facts())
        self.num_pages = self.num_bytes = 0

    def ask(self, incoming: Incoming) -> None:
        self.ask_replica(incoming, max(0, incoming.replica))

    def ask_replica(self, incoming: Incoming, replica: int) -> None:
        """replica: to begin with; the first one says how many there are."""
        address = incoming.host, incoming.port, replica
        with self.wake:
            peer = self.peers.get(address)
            if peer is None or peer.is_lost:
                if len(self.peers) >= _MOST_PEERS:
                    _fail(incoming, "connections to too many prefill servers")
                    return
                peer = self.peers[address] = _Peer(self, address)
                peer.reads.start()
            peer.asked.append(incoming)
            self.wake.notify_all()

    def withdraw(self, rooms: Iterable[Incoming]) -> None:
        """When this returns, the pages of these are not written any more. It waits for a copy at most, never for the network."""
        with self.copying:
            for one in rooms:
                one.is_wanted = False
        with self.wake:
            self.wake.notify_all()

    def weights_changed(self) -> None:
        """What comes from now on is for the weights as they are now. Rooms are withdrawn before."""
        self.facts.changed()
        self._disconnect()

    def close(self) -> None:
        for peer in self._disconnect():
            peer.reads.join(wire.SILENT_S)
        # They hold the model, and the cache's callbacks hold this: a circle that the interpreter would not free at its end.
        del self.transfer

    def _disconnect(self) -> "list[_Peer]":
        with self.wake:
            peers, self.peers = list(self.peers.values()), {}
            self.wake.notify_all()
        for peer in peers:
            peer.close()
        return peers


class _Peer:
    """A prefill server's replica: its connection, and the rooms that it was asked for. asked: those that it is to be told. reads: its thread, which
    connects and then takes what comes; another one sends.

    The sink's lock guards what both threads and the scheduler's use.
    """

    def __init__(self, sink: PageSink, address: tuple[str, int, int]) -> None:
        self._sink = sink
        self._address = address
        self.asked: deque[Incoming] = deque()
        self.reads = threading.Thread(target=self._run, name="kv-sink-reads", daemon=True)
        self.is_lost = False
        self._rooms: dict[int, Incoming] = {}
        self._num_asked = 0
        self._progress = 0
        self._replicas = 1
        self._connection: wire.Connection | None = None
        self._ring: Ring | None = None
        self._page_bytes = 0
        self._layouts: tuple[Layout, Layout] | None = None  # theirs and ours, where they differ
        host, port, replica = address
        self.name = f"{host}:{port + replica}"

    def close(self) -> None:
        self.is_lost = True  # before it looks for a connection: `_begin` has one first and looks at this then
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        why, is_wrong = "its prefill server was lost", False
        try:
            self._begin()
            threading.Thread(target=self._send, name="kv-sink-sends", daemon=True).start()
            connection = self._connection
            assert connection is not None
            while True:
                self._take(*connection.receive())
        except wire.Refused as error:
            why, is_wrong = f"the prefill server {self.name} cannot be used: {error.message}", True
            _logger.warning("%s", why)
        except (wire.Lost, OSError) as error:
            _logger.info("prefill server %s: %s", self.name, error)
        except Exception:
            _logger.exception("what the prefill server %s sent could not be used", self.name)
        finally:
            self._end(why, is_wrong)

    def _begin(self) -> None:
        """Connect. Raises OSError, Lost or Refused."""
        facts = self._sink.facts.read()
        host, port, replica = self._address
        self._connection = wire.Connection(self._connect(host, port + replica))
        if self.is_lost:
            raise wire.Lost("it is not needed any more")
        if self._sink.uses_memory:
            try:
                self._ring = Ring.create()
            except OSError as error:
                _logger.warning("no memory in common with %s (%s): KV goes over TCP", self.name, error.strerror)
        challenge, welcome = wire.introduce(
            self._connection, self._sink.secret, facts, "" if self._ring is None else str(self._ring.path)
        )
        own_bytes, self._page_bytes = self._sink.transfer.page_bytes, welcome.page_bytes
        if any(welcome.facts.get(name) != facts.get(name) for name in ("page", "ranks", "draft")):
            theirs, ours = self._layouts = Layout.of(welcome.facts), Layout.of(facts)
            own_bytes = (own_bytes - ours.draft_bytes) // ours.cells * theirs.cells + theirs.draft_bytes
            if ours.draft not in ("", theirs.draft):
                why = "has another draft model" if theirs.draft else "has no draft model"
                _logger.warning("%s %s: what it computes is drafted for without KV of the prompt", self.name, why)
        if welcome.page_bytes != own_bytes:
            raise wire.Refused(f"its pages have {welcome.page_bytes} bytes, not {own_bytes}")
        if self._ring is not None:
            self._ring.unlink()
            if not welcome.has_memory:
                self._ring = None
        self._replicas = challenge.replicas

    def _connect(self, host: str, port: int) -> socket.socket:
        """To an address of the host that requests may name, and to no other. Raises OSError or Refused."""
        addresses = [str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        allowed = [address for address in addresses if self._sink.allows(host, address)]
        if not allowed:
            raise wire.Refused("it is not among --disaggregation-prefill-hosts")
        for address in allowed[:-1]:
            with contextlib.suppress(OSError):
                return socket.create_connection((address, port), CONNECT_S)
        return socket.create_connection((allowed[-1], port), CONNECT_S)

    def _end(self, why: str, is_wrong: bool) -> None:
        self.close()
        with self._sink.wake:
            # Nobody asks it from here on: `ask_replica` makes another.
            if self._sink.peers.get(self._address) is self:
                del self._sink.peers[self._address]
            lost = [*self.asked, *self._rooms.values()]
            self.asked.clear()
            self._rooms.clear()
            self._sink.wake.notify_all()
        for one in lost:
            _fail(one, why, is_wrong)
        if self._ring is not None:
            self._ring.close()

    # -- what comes

    def _take(self, message: wire.Message, data: memoryview) -> None:
        match message:
            case wire.Pages():
                self._take_pages(message, data)
            case wire.Done():
                with self._sink.wake:
                    done = self._rooms.pop(message.number, None)
                if done is not None:
                    if done.num_arrived < len(done.pages):
                        raise wire.Lost("the output of a room came before its pages")
                    done.output = _read_output.decode(message.output)
                    done.is_done = True
            case wire.Failed():
                with self._sink.wake:
                    failed = self._rooms.pop(message.number, None)
                if failed is not None:
                    _fail(failed, f"room {failed.room}: {message.reason}", message.is_wrong)
            case wire.Beat():
                if message.progress != self._progress:
                    self._progress = message.progress
                    with self._sink.wake:
                        for one in self._rooms.values():
                            one.num_news += 1
            case _:
                raise wire.Lost("the other side has an incompatible protocol")

    def _take_pages(self, message: wire.Pages, data: memoryview) -> None:
        sink, page_bytes = self._sink, self._page_bytes
        if message.place >= 0:
            if self._ring is None:
                raise wire.Lost("pages are in memory that there is not")
            data = self._ring.view[message.place : message.place + message.count * page_bytes]
            if wire.checksum(data) != message.checksum:
                raise wire.Lost("pages were damaged")
        if len(data) != message.count * page_bytes:
            raise wire.Lost("pages do not have the length that they should have")
        with sink.wake:
            one = self._rooms.get(message.number)
        if one is not None:
            if message.first != self._num_known(one) + one.num_came:
                raise wire.Lost("pages came out of order")
            one.num_came += message.count
            count, given = message.count, data
            if self._layouts is not None:
                count, given = converted(one, message, data, *self._layouts)
            pages = one.pages[one.num_arrived : one.num_arrived + count]
            if len(pages) < count:
                raise wire.Lost("pages came out of order")
            with sink.copying:
                if one.is_wanted:
                    if pages:
                        sink.transfer.write(pages, given)
                    one.num_arrived += count
                    one.num_news += 1
                    sink.num_pages += count
                    sink.num_bytes += len(data)
        if message.place >= 0:
            assert self._connection is not None
            self._connection.send(wire.Taken())

    def _num_known(self, one: Incoming) -> int:
        """Pages of the other side that need not come."""
        return (
            one.num_known if self._layouts is None else one.num_known * self._layouts[1].page // self._layouts[0].page
        )

    # -- what goes

    def _send(self) -> None:
        connection = self._connection
        assert connection is not None
        said_s = used_s = time.monotonic()
        try:
            while not self.is_lost:
                with self._sink.wake:
                    message = self._next_message()
                    if message is None:
                        self._sink.wake.wait(max(0.0, said_s + wire.BEAT_S - time.monotonic()))
                    if message is not None or self._rooms:
                        used_s = time.monotonic()
                    elif time.monotonic() > used_s + IDLE_S:
                        return
                if message is None:
                    if time.monotonic() < said_s + wire.BEAT_S:
                        continue
                    message = wire.Beat()
                connection.send(message)
                said_s = time.monotonic()
        except wire.Lost:
            pass
        finally:
            self.close()

    def _next_message(self) -> wire.Message | None:
        """The lock is held."""
        for number, one in self._rooms.items():  # before what is asked: a room may be asked for again
            if not one.is_wanted:
                del self._rooms[number]
                return wire.Leave(one.room, number)
        while self.asked:
            one = self.asked.popleft()
            own = self._address[2]
            wanted = one.replica if one.replica >= 0 else one.first % self._replicas
            if not one.is_wanted and wanted == own:
                return wire.Leave(one.room, -1)
            if wanted >= self._replicas:
                _fail(one, f"the prefill server has {self._replicas} replicas, and none of number {wanted}", True)
            elif wanted != own:
                self._sink.ask_replica(one, wanted)
            elif any(other.room == one.room for other in self._rooms.values()):
                _fail(one, f"room {one.room} is in use by another request", True)
            else:
                self._num_asked += 1
                self._rooms[self._num_asked] = one
                return wire.Ask(one.room, one.rid, one.key, self._num_known(one), one.again, self._num_asked)
        return None


def converted(
    one: Incoming, message: wire.Pages, data: memoryview, theirs: Layout, ours: Layout
) -> tuple[int, memoryview]:
    """How many pages of ours are full, or the last one, with what came, and their bytes; what is left waits in `Incoming.rest`."""
    rows, begin = theirs.rows(data, message.count), message.first * theirs.page
    if theirs.draft != ours.draft:
        own = rows[:, : rows.shape[1] - theirs.draft_unit_bytes]
        rows = np.pad(own, ((0, 0), (0, ours.draft_unit_bytes)))  # zeros, not what was there before
    if one.rest is None:
        rows = rows[max(0, one.num_known * ours.page - begin) // ours.unit :]
    else:
        rows = np.concatenate([one.rest, rows])
    missing = (len(one.pages) - one.num_arrived) * ours.units
    if begin + message.count * theirs.page >= one.num_tokens:
        rows = np.pad(rows[:missing], ((0, max(0, missing - len(rows))), (0, 0)))
    count = min(len(rows), missing) // ours.units
    one.rest = rows[count * ours.units :].copy()
    return count, ours.pages(rows[: count * ours.units])


def _fail(one: Incoming, why: str, is_wrong: bool = False) -> None:
    one.failure, one.is_wrong = why, is_wrong
    one.is_done = True
