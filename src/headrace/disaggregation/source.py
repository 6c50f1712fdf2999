"""The prefill side: a socket that decode servers connect to, and the rooms whose pages it sends.

Owns the threads that listen and send, and which connection asked for which room. Owns no page: whoever opens a room holds its pages until the room is
over or withdrawn. Nothing here fails a request: a room that cannot be sent is over, and the decode side computes the prompt itself.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

import msgspec

from headrace.disaggregation import wire
from headrace.disaggregation.shared_memory import Ring
from headrace.errors import ConfigError
from headrace.log import get_logger
from headrace.messages.step import PageTransfer

_logger = get_logger(__name__)

_PART_BYTES = 4 << 20
"""Sent at a time."""

_MOST_CONNECTIONS = 256
_MOST_ASKED = 1 << 16
"""Rooms that a connection may ask for before there is a request for them."""


@dataclass(eq=False, slots=True)
class Outgoing:
    """A room. key: see `wire.prompt_key`. pages: of its prompt, as far as they are computed; grows.

    output: of `wire.Done`; empty until all pages are there. failure: why there will be no more. is_wanted: set to False to end it (`withdraw`).
    is_over: all is sent, or the connection that asked is lost. num_sent: pages that are sent or known there. is_asked: a connection has asked.
    """

    room: int
    rid: str
    key: bytes
    pages: list[int] = field(default_factory=list)
    output: bytes = b""
    failure: str = ""
    is_wanted: bool = True
    is_over: bool = False
    is_asked: bool = False
    num_sent: int = 0


class PageSource:
    """See the module docstring. address: where it listens. replicas: see `wire.Challenge`. secret: that both sides know.

    progress: of the scheduler, see `wire.Beat`. Counts since the start: num_pages and num_bytes that were sent, num_connections that were accepted.
    """

    def __init__(self, transfer: PageTransfer, address: tuple[str, int], secret: bytes, replicas: int = 1) -> None:
        self.transfer = transfer
        self._secret = secret
        self._replicas = replicas
        self._rooms: dict[int, Outgoing] = {}
        self._peers: set[_Peer] = set()
        self._threads: set[threading.Thread] = set()
        self.wake = threading.Condition()
        self._copying = threading.Lock()
        self.facts = wire.Facts(lambda: self.transfer.facts())
        self._is_closed = False
        self.progress = 0
        self.num_pages = self.num_bytes = self.num_connections = 0
        try:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            # `::` is every address of IPv4, too, as for HTTP.
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            self._listener = socket.create_server(address, family=family, backlog=64, dualstack_ipv6=both)
        except OSError as error:
            raise ConfigError(f"--disaggregation-bootstrap-port {address[1]}: {error.strerror}") from None
        self.port: int = self._listener.getsockname()[1]

    def start(self) -> None:
        self._begin(self._accept, "kv-source")

    def open(self, outgoing: Outgoing) -> None:
        """There is a request for a room, whose number no other has. Connections may have asked for it already."""
        with self.wake:
            self._rooms[outgoing.room] = outgoing
            for peer in self._peers:
                if (ask := peer.early.pop(outgoing.room, None)) is not None:
                    peer.take(outgoing, ask)
            self.wake.notify_all()

    def asked_again(self, rooms: Container[int]) -> set[int]:
        """Those of `rooms` that are not open, and that a decode server asks for again. It is told at once that there are no others."""
        found: set[int] = set()
        with self.wake:
            for peer in self._peers:
                again = [ask for ask in peer.early.values() if ask.again]
                found.update(ask.room for ask in again if ask.room in rooms)
                for ask in again:
                    if ask.room not in rooms:
                        del peer.early[ask.room]
                        peer.refuse(ask, "its prefill server does not know it")
            self.wake.notify_all()
        return found

    def tell(self) -> None:
        """A room has more pages, its output, or a failure."""
        with self.wake:
            self.wake.notify_all()

    def withdraw(self, rooms: Iterable[Outgoing]) -> None:
        """When this returns, the pages of these are not read any more. It waits for a copy at most, never for the network."""
        with self._copying:
            for one in rooms:
                one.is_wanted = False
                if self._rooms.get(one.room) is one:
                    del self._rooms[one.room]
        self.tell()

    def weights_changed(self) -> None:
        """KV from now on is of the weights as they are now: whoever is connected is to ask again, and compares them. Rooms are withdrawn before."""
        self.facts.changed()
        with self.wake:
            peers = list(self._peers)
        for peer in peers:
            peer.connection.close()

    def close(self) -> None:
        with self.wake:
            self._is_closed = True
            peers, threads = list(self._peers), list(self._threads)
            self.wake.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for peer in peers:
            peer.connection.close()
        for thread in threads:
            thread.join(wire.SILENT_S)
        # They hold the model, and the cache's callbacks hold this: a circle that the interpreter would not free at its end.
        del self.transfer

    # -- in threads of its own

    def _begin(self, work: Callable[..., None], name: str, *given: object) -> None:
        def run() -> None:
            try:
                work(*given)
            finally:
                with self.wake:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self.wake:  # `close` joins no thread that has not begun
            self._threads.add(thread)
            thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.05)  # too many open files, for example
                continue
            with self.wake:
                is_full = len(self._peers) >= _MOST_CONNECTIONS
            if is_full:
                sock.close()
                continue
            peer = _Peer(self, wire.Connection(sock), f"{address[0]}:{address[1]}")
            with self.wake:
                self._peers.add(peer)
            self._begin(self._serve, "kv-source-reads", peer)
            del peer, sock  # or the connection would be open until the next one comes

    def _serve(self, peer: "_Peer") -> None:
        """Of one connection, from its beginning to its end."""
        try:
            facts = self.facts.read()
            hello, welcome = wire.greet(peer.connection, self._secret, facts, self.transfer.page_bytes, self._replicas)
            peer.attach(hello.memory, self.pages_at_once * self.transfer.page_bytes)
            peer.connection.send(msgspec.structs.replace(welcome, has_memory=peer.ring is not None))
            self.num_connections += 1
            self._begin(self._send, "kv-source-sends", peer)
            while True:
                self._take(peer, peer.connection.receive()[0])
        except wire.Refused as error:
            _logger.warning("%s: %s", peer.name, error.message)
        except wire.Lost as error:
            _logger.debug("%s: %s", peer.name, error.message)
        except Exception:
            _logger.exception("what a decode server sent could not be served")
        finally:
            self._lose(peer)

    def _take(self, peer: "_Peer", message: wire.Message) -> None:
        with self.wake:
            match message:
                case wire.Ask():
                    outgoing = self._rooms.get(message.room)
                    if outgoing is not None:
                        peer.take(outgoing, message)
                    elif len(peer.early) < _MOST_ASKED:
                        peer.early[message.room] = message
                case wire.Leave():
                    left = peer.rooms.pop(message.number, None)
                    if (early := peer.early.get(message.room)) is not None and early.number == message.number:
                        del peer.early[message.room]
                    if message.number < 0 and (one := self._rooms.get(message.room)) is not None and not one.is_asked:
                        left = one
                    if left is not None:
                        left.is_over = True
                case wire.Taken():
                    if peer.ring is not None:
                        peer.ring.give_back()
                case wire.Beat():
                    return
                case _:
                    raise wire.Lost("the other side has an incompatible protocol")
            self.wake.notify_all()

    def _lose(self, peer: "_Peer") -> None:
        peer.connection.close()
        with self.wake:
            self._peers.discard(peer)
            peer.is_lost = True
            for one in peer.rooms.values():
                one.is_over = True
            peer.rooms.clear()
            self.wake.notify_all()
        if peer.ring is not None:
            peer.ring.close()

    def _send(self, peer: "_Peer") -> None:
        """All that goes to one connection after its beginning."""
        beat_s = time.monotonic()
        try:
            while not peer.is_lost:
                with self.wake:
                    work = peer.next_work(self.pages_at_once)
                    if work is None:
                        self.wake.wait(max(0.0, beat_s + wire.BEAT_S - time.monotonic()))
                if work is not None:
                    work(self)
                if (
                    time.monotonic() >= beat_s + wire.BEAT_S
                ):  # Beside pages, too: rooms that have none yet are to know that we compute.
                    peer.connection.send(wire.Beat(self.progress))
                    beat_s = time.monotonic()
        except wire.Lost:
            pass
        except Exception:
            _logger.exception("KV could not be sent")
        finally:
            self._lose(peer)

    @property
    def pages_at_once(self) -> int:
        return max(1, _PART_BYTES // self.transfer.page_bytes)

    def copied(self, outgoing: Outgoing, pages: list[int], ring: Ring | None) -> tuple[int, memoryview, int] | None:
        """Where pages are in the shared memory, -1 = nowhere, their bytes and checksum, 0 = nowhere. None: they are not to be read any more."""
        with self._copying:
            if not outgoing.is_wanted:
                return None
            if ring is None:
                return -1, self.transfer.read(pages), 0
            place, view = ring.take(len(pages) * self.transfer.page_bytes)
            return place, view, wire.checksum(view, self.transfer.read_into(pages, view))


Work = Callable[[PageSource], None]


class _Peer:
    """A connection from a decode server. early: what it has asked for before there was a request, by room; rooms: that it waits for, by the number of
    its ask.

    ring: memory that both have, or None.
    """

    def __init__(self, source: PageSource, connection: wire.Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        self.early: dict[int, wire.Ask] = {}
        self.rooms: dict[int, Outgoing] = {}
        self.ring: Ring | None = None
        self.is_lost = False
        self._failures: list[wire.Failed] = []

    def attach(self, memory: str, part_bytes: int) -> None:
        """Use memory that the other side has made, if there is some and it is large enough for parts of so many bytes."""
        ring = Ring.attach(memory) if memory else None
        if ring is not None and ring.divide(part_bytes):
            self.ring = ring

    def take(self, outgoing: Outgoing, ask: wire.Ask) -> None:
        """It waits for a room from now on, if it may. The lock is held."""
        if outgoing.key != ask.key:
            self.refuse(ask, "its prefill server has another prompt there")
        elif outgoing.is_asked and outgoing.is_over and not ask.again and ask.rid == outgoing.rid:
            self.early[ask.room] = ask  # of the same request, which is sent again: this one ends
        elif outgoing.is_asked and not (ask.again and outgoing.is_over):
            self.refuse(ask, "another request has asked for its KV")
        else:
            outgoing.is_asked, outgoing.is_over = True, False
            outgoing.num_sent = ask.num_known
            self.rooms[ask.number] = outgoing

    def refuse(self, ask: wire.Ask, why: str) -> None:
        """The lock is held."""
        self._failures.append(wire.Failed(ask.number, why, is_wrong=not ask.again))

    def next_work(self, at_once: int) -> Work | None:
        """What to send now, in turns over the rooms; None: nothing. The lock is held."""
        if self._failures:
            failure = self._failures.pop()
            return lambda source: self.connection.send(failure)
        for number, one in list(self.rooms.items()):
            first, pages = one.num_sent, one.pages[one.num_sent : one.num_sent + at_once]
            if not one.is_wanted or (one.failure and not pages):
                del self.rooms[number]
                one.is_over = True
                message = wire.Failed(number, one.failure or "its prefill server needs the pages")
                return lambda source: self.connection.send(message)
            if pages:
                if self.ring is not None and not self.ring.has_room:
                    return None
                self.rooms[number] = self.rooms.pop(number)  # the others come before it now
                one.num_sent += len(pages)
                return lambda source: self._send_pages(source, one, number, first, pages)
            if one.output:
                del self.rooms[number]
                return lambda source: self._send_output(one, number)
        return None

    def _send_pages(self, source: PageSource, one: Outgoing, number: int, first: int, pages: list[int]) -> None:
        copied = source.copied(one, pages, self.ring)
        if copied is None:
            return
        place, data, checksum = copied
        if place < 0:
            self.connection.send(wire.Pages(number, first, len(pages)), data)
        else:
            self.connection.send(wire.Pages(number, first, len(pages), place, checksum))
        source.num_pages += len(pages)
        source.num_bytes += len(data)

    def _send_output(self, one: Outgoing, number: int) -> None:
        try:
            self.connection.send(wire.Done(number, one.output))
        finally:
            one.is_over = True  # also where the connection is lost: no room of the connection is this one any more
