"""What two servers say to each other: frames that arrive whole or not at all, and a beginning that only who knows the secret gets through."""

import contextlib
import faulthandler
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest

from headrace.config.web import PrefillHosts
from headrace.disaggregation import wire
from headrace.disaggregation.shared_memory import Ring
from headrace.disaggregation.sink import Incoming, PageSink
from headrace.disaggregation.source import Outgoing, PageSource
from headrace.messages.outputs import TokenIDOut
from headrace.messages.step import Sums, sums_of

SECRET = b"a secret of this test"
PAGE_BYTES = 64
FACTS = {"weights": "w1", "kv": "int8"}
WAIT_S = 60.0


class Pages:
    """A `PageTransfer` over bytes."""

    page_bytes = PAGE_BYTES

    def __init__(self, count: int = 0) -> None:
        self.kv = {page: bytes([page % 251]) * PAGE_BYTES for page in range(count)}

    def facts(self) -> dict[str, str]:
        return FACTS

    def read(self, pages: list[int]) -> memoryview:
        return memoryview(b"".join(self.kv[page] for page in pages))

    def read_into(self, pages: list[int], into: memoryview) -> Sums:
        into[:] = self.read(pages)
        return sums_of(into)

    def write(self, pages: list[int], data: memoryview) -> None:
        for number, page in enumerate(pages):
            self.kv[page] = bytes(data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SILENT_S", 2 * WAIT_S)


@pytest.fixture
def ends() -> Iterator[tuple[wire.Connection, wire.Connection]]:
    """The prefill side's end of a connection, and the decode side's."""
    one, other = map(wire.Connection, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def begin(ends, facts=FACTS, secret: bytes = SECRET) -> tuple[Future, Future]:
    with ThreadPoolExecutor(2) as threads:

        def prefill() -> wire.Hello:
            hello, welcome = wire.greet(ends[0], SECRET, FACTS, PAGE_BYTES, 3)
            ends[0].send(welcome)
            return hello

        return threads.submit(prefill), threads.submit(wire.introduce, ends[1], secret, facts)


def test_frames_arrive_as_they_were_sent(ends):
    page = bytes(range(256)) * 5000
    thread = threading.Thread(target=ends[0].send, args=(wire.Beat(7), b""))
    thread.start()
    assert ends[1].receive() == (wire.Beat(7), memoryview(b""))
    thread.join()
    ends[1].trusts = True
    thread = threading.Thread(target=ends[0].send, args=(wire.Pages(1, 2, 3), page))
    thread.start()
    message, data = ends[1].receive()
    thread.join()
    assert (message, bytes(data)) == (wire.Pages(1, 2, 3), page)


def test_both_sides_know_the_secret_and_what_they_have_in_common(ends):
    prefill, decode = begin(ends)
    assert prefill.result().facts == FACTS
    challenge, welcome = decode.result()
    assert (challenge.replicas, welcome.page_bytes) == (3, PAGE_BYTES)
    assert ends[0].trusts
    assert ends[1].trusts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"secret": b"another secret"}, "its secret is another one"),
        ({"facts": FACTS | {"kv": "bfloat16"}}, "kv: int8 computes the prompt, bfloat16 goes on"),
        ({"facts": FACTS | {"more": "x"}}, "more: none computes the prompt, x goes on"),
    ],
)
def test_who_does_not_fit_is_refused_on_both_sides(ends, changes, words):
    prefill, decode = begin(ends, **changes)
    with pytest.raises(wire.Refused):
        prefill.result()
    with pytest.raises(wire.Refused, match=words):
        decode.result()
    assert not ends[0].trusts
    assert not ends[1].trusts


def test_a_prefill_server_without_the_secret_is_refused(ends):
    """It cannot prove anything with what the decode side has sent."""
    with ThreadPoolExecutor(1) as threads:
        decode = threads.submit(wire.introduce, ends[1], SECRET, FACTS)
        ends[0].send(wire.Challenge(wire.PROTOCOL, bytes(32), 1))
        hello, _ = ends[0].receive()
        ends[0].send(wire.Welcome(hello.proof, PAGE_BYTES, FACTS))
        with pytest.raises(wire.Refused, match="secret"):
            decode.result()


@pytest.mark.parametrize("change", [0, 5, 20, 33, -1])
def test_a_damaged_frame_ends_the_connection(change: int):
    one, other = socket.socketpair()
    with one, other:
        sender = wire.Connection(one)
        sender.send(wire.Pages(1, 2, 3), b"x" * 500)
        frame = bytearray(other.recv(4096))
        frame[change] ^= 4
        one.sendall(frame)
        one.shutdown(socket.SHUT_WR)
        with pytest.raises(wire.Lost):
            wire.Connection(other).receive()


def test_the_number_of_a_closed_connection_is_no_other_socket_s_while_a_thread_may_wait_for_it():
    sock, other = socket.socketpair()
    connection = wire.Connection(sock)
    number = sock.fileno()
    connection.close()
    connection.close()
    assert sock.fileno() == number
    assert other.recv(1) == b"", "the other side is told at once"
    with pytest.raises(wire.Lost):
        connection.receive()
    with pytest.raises(wire.Lost):
        connection.send(wire.Beat())
    del connection
    assert sock.fileno() == -1
    other.close()


def test_much_is_not_taken_from_a_stranger(ends):
    thread = threading.Thread(target=lambda: ends[0].send(wire.Beat(), bytes(1 << 17)), daemon=True)
    thread.start()
    with pytest.raises(wire.Lost, match="incompatible"):
        ends[1].receive()
    ends[1].close()
    thread.join()


# -- a source and a sink


class Two:
    """A source that listens and a sink that asks it."""

    def __init__(self, uses_memory: bool = False, count: int = 40, replicas: int = 1) -> None:
        self.source = PageSource(Pages(count), ("127.0.0.1", 0), SECRET, replicas)
        self.source.start()
        self.sink = PageSink(Pages(), SECRET, uses_memory)

    def __enter__(self) -> "Two":
        return self

    def __exit__(self, *error: object) -> None:
        self.sink.close()
        self.source.close()

    def ask(self, room: int, pages: list[int], key: bytes = b"k" * 16, **fields: object) -> Incoming:
        incoming = Incoming(
            "127.0.0.1", self.source.port, room, f"r{room}", key, fields.pop("first", room), pages=pages, **fields
        )
        self.sink.ask(incoming)
        return incoming

    def open(self, room: int, pages: list[int], is_done: bool = True) -> Outgoing:
        outgoing = Outgoing(room, f"r{room}", b"k" * 16, pages)
        if is_done:
            outgoing.output = msgspec.msgpack.encode(TokenIDOut(f"r{room}", b"", 1))
        self.source.open(outgoing)
        return outgoing


def until(condition) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() >= end_s:
            faulthandler.dump_traceback(sys.__stderr__)
            raise AssertionError("it did not come to that: stderr has what each thread waits for")
        time.sleep(0.002)


@pytest.mark.parametrize("uses_memory", [False, True])
@pytest.mark.parametrize("is_asked_first", [False, True])
def test_pages_of_many_rooms_come_in_order(monkeypatch, uses_memory: bool, is_asked_first: bool):
    monkeypatch.setattr("headrace.disaggregation.source._PART_BYTES", 3 * PAGE_BYTES)
    with Two(uses_memory) as two:
        rooms = [[(room * 7 + i) % 40 for i in range(room)] for room in range(1, 30)]
        incoming, outgoing = [], []
        for room, pages in enumerate(rooms, 1):
            into = [1000 * room + i for i in range(max(0, room - 2))]
            if is_asked_first:
                incoming.append(two.ask(room, into, num_known=min(2, room)))
            outgoing.append(two.open(room, pages))
            if not is_asked_first:
                incoming.append(two.ask(room, into, num_known=min(2, room)))
        until(lambda: all(one.is_done for one in incoming))
        for room, (one, pages) in enumerate(zip(incoming, rooms, strict=True), 1):
            assert (one.output.rid, one.failure) == (f"r{room}", "")
            assert [two.sink.transfer.kv[page] for page in one.pages] == [
                two.source.transfer.kv[page] for page in pages[2:]
            ]
        until(lambda: all(one.is_over for one in outgoing))
        assert two.source.num_connections == 1
        two.source.withdraw(outgoing)


def test_pages_go_out_before_the_prompt_is_done():
    with Two() as two:
        outgoing = two.open(1, [1, 2], is_done=False)
        incoming = two.ask(1, [10, 11, 12])
        until(lambda: incoming.num_arrived == 2)
        assert not incoming.is_done
        outgoing.pages = [1, 2, 3]
        outgoing.output = msgspec.msgpack.encode(TokenIDOut("r1", b"", 1))
        two.source.tell()
        until(lambda: incoming.is_done)
        assert incoming.num_arrived == 3


def test_signs_of_work_come_while_pages_of_other_rooms_do(monkeypatch: pytest.MonkeyPatch):
    sent, send = [], wire.Connection.send

    def noting(connection: wire.Connection, message: wire.Message, data: memoryview | bytes = b"") -> None:
        sent.append(message)
        send(connection, message, data)

    monkeypatch.setattr(wire.Connection, "send", noting)
    monkeypatch.setattr(wire, "BEAT_S", 0.0)
    monkeypatch.setattr("headrace.disaggregation.source._PART_BYTES", PAGE_BYTES)
    with Two() as two:
        two.source.progress = 7
        two.open(1, list(range(40)))
        incoming = two.ask(1, list(range(100, 140)))
        until(lambda: incoming.is_done)
    places = [place for place, message in enumerate(sent) if isinstance(message, wire.Pages)]
    assert wire.Beat(7) in sent[places[0] : places[-1]]


def test_a_room_of_another_prompt_one_in_use_and_one_that_fails():
    with Two() as two:
        outgoing = two.open(1, [1], is_done=False)
        wrong = two.ask(1, [10], b"another prompt..")
        until(lambda: wrong.is_done)
        assert (wrong.is_wrong, "another prompt" in wrong.failure, outgoing.is_asked) == (True, True, False)
        first, second = two.ask(1, [10]), two.ask(1, [11])
        until(lambda: second.is_done)
        assert (second.is_wrong, "in use" in second.failure) == (True, True)
        outgoing.failure = "it is broken"
        two.source.tell()
        until(lambda: first.is_done)
        assert (first.is_wrong, first.failure) == (False, "room 1: it is broken")


def test_who_leaves_frees_the_room_and_who_is_lost_all():
    with Two() as two:
        outgoing = [two.open(room, [1], is_done=False) for room in (1, 2, 3)]
        incoming = [two.ask(room, [room + 10, room + 20]) for room in (1, 2, 3)]
        until(lambda: all(one.num_arrived for one in incoming))
        two.sink.withdraw(incoming[:1])
        until(lambda: outgoing[0].is_over)
        assert not outgoing[1].is_over
        two.sink.weights_changed()
        until(lambda: outgoing[1].is_over and outgoing[2].is_over)
        until(lambda: incoming[1].is_done and incoming[2].is_done)
        assert not incoming[1].is_wrong


def test_a_source_that_ends_fails_what_was_asked_and_is_asked_again_later():
    with Two() as two:
        incoming = two.ask(1, [10])
        until(lambda: two.source.num_connections == 1)
        two.source.weights_changed()
        until(lambda: incoming.is_done)
        assert not incoming.is_wrong
        two.open(2, [1])
        again = two.ask(2, [11])
        until(lambda: again.is_done)
        assert again.output is not None


def test_a_room_is_over_when_the_connection_is_lost_at_its_last_message(monkeypatch: pytest.MonkeyPatch):
    send = wire.Connection.send

    def losing(connection: wire.Connection, message: wire.Message, data: memoryview | bytes = b"") -> None:
        if isinstance(message, wire.Done):
            raise wire.Lost("lost")
        send(connection, message, data)

    monkeypatch.setattr(wire.Connection, "send", losing)
    with Two() as two:
        outgoing, incoming = two.open(1, [1]), two.ask(1, [10])
        until(lambda: incoming.is_done)
        until(lambda: outgoing.is_over)


def test_who_never_asks_may_say_so(monkeypatch: pytest.MonkeyPatch):
    begin = threading.Event()
    introduce = wire.introduce
    monkeypatch.setattr(wire, "introduce", lambda *given: begin.wait(WAIT_S) and introduce(*given))
    with Two() as two:
        outgoing, incoming = two.open(1, [1]), two.ask(1, [10])
        two.sink.withdraw([incoming])
        begin.set()
        until(lambda: outgoing.is_over)
        assert not outgoing.is_asked


def test_a_room_that_is_used_again_gets_nothing_of_its_first_use():
    with Two() as two:
        outgoing = two.open(1, [1, 2], is_done=False)
        first = two.ask(1, [10, 11, 12])
        until(lambda: first.num_arrived == 2)
        two.sink.withdraw([first])
        again = two.ask(1, [20, 21, 22])  # the same request, before the prefill server has it
        until(lambda: outgoing.is_over)
        two.open(1, [4, 5, 6])
        until(lambda: again.is_done)
        assert (again.output is not None, again.num_arrived, first.num_arrived) == (True, 3, 2)
        assert [two.sink.transfer.kv[page] for page in (20, 21, 22)] == [
            two.source.transfer.kv[page] for page in (4, 5, 6)
        ]


def test_a_stranger_is_not_waited_for(ends):
    ends[0].until_s = time.monotonic() + 0.1
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.01):
            with contextlib.suppress(wire.Lost):
                ends[1].send(wire.Beat())

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(wire.Lost, match="in time"):
        for _ in iter(ends[0].receive, None):
            pass
    stop.set()
    thread.join()


def test_a_room_that_was_lost_may_be_asked_for_again():
    with Two() as two:
        outgoing = two.open(1, [1, 2], is_done=False)
        first = two.ask(1, [10, 11, 12])
        until(lambda: first.num_arrived == 2)
        twice = two.ask(1, [20], again=True)  # while the other still waits
        until(lambda: twice.is_done)
        two.sink.weights_changed()
        until(lambda: outgoing.is_over)
        again, unknown = two.ask(1, [13, 14, 15], again=True), two.ask(2, [16], again=True)
        until(lambda: again.num_arrived == 2)
        two.source.withdraw([outgoing])
        until(lambda: again.is_done)
        later = two.ask(1, [17, 18, 19], again=True)
        until(lambda: two.source.asked_again({1}) == {1})
        two.source.open(Outgoing(1, "r1", b"k" * 16, [3], failure="the rest is computed"))
        until(lambda: later.is_done and (two.source.asked_again({1}) or unknown.is_done))
        assert [one.num_arrived for one in (twice, again, unknown, later)] == [0, 2, 0, 1]
        assert not any(one.is_wrong for one in (again, unknown, later))


def test_nothing_is_connected_to_but_addresses_of_servers_that_may_be_named():
    with Two() as two, socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        two.sink.allows = PrefillHosts(networks=()).allows
        refused = Incoming("localhost", other.getsockname()[1], 1, "r", b"", 1, pages=[9])
        two.sink.ask(refused)
        until(lambda: refused.is_done)
        assert refused.is_wrong
        assert "not among --disaggregation-prefill-hosts" in refused.failure
        with pytest.raises(BlockingIOError):
            other.accept()
        two.sink.allows = PrefillHosts(frozenset({"localhost"}), ()).allows
        two.sink.ask(waits := Incoming("localhost", other.getsockname()[1], 1, "r", b"", 1, pages=[9]))
        other.settimeout(WAIT_S)
        other.accept()[0].close()
        until(lambda: waits.is_done)


def test_prefill_servers_that_do_not_answer_leave_nothing(monkeypatch):
    monkeypatch.setattr("headrace.disaggregation.sink._MOST_PEERS", 2)
    with Two() as two, socket.create_server(("127.0.0.1", 0)) as silent:
        two.open(1, [1])
        port = two.source.port
        waits = Incoming("127.0.0.1", silent.getsockname()[1], 1, "w", b"", 1, pages=[9])
        two.sink.ask(waits)
        assert two.ask(1, [10])
        late = Incoming("127.0.0.2", port, 1, "late", b"", 1, pages=[11])
        two.sink.ask(late)
        assert late.is_done
        assert "too many" in late.failure
        silent.close()
        two.sink.weights_changed()
        until(lambda: waits.is_done and not two.sink.peers)


def test_a_connection_that_comes_late_is_not_waited_for(monkeypatch):
    """Weights change while the sink connects to somebody who accepts and says nothing."""
    began, goes_on = threading.Event(), threading.Event()
    connect = socket.create_connection

    def late(*given: object) -> socket.socket:
        connected = connect(*given)
        began.set()
        goes_on.wait(WAIT_S)
        return connected

    monkeypatch.setattr(socket, "create_connection", late)
    with Two() as two, socket.create_server(("127.0.0.1", 0)) as silent:
        waits = Incoming("127.0.0.1", silent.getsockname()[1], 1, "w", b"", 1, pages=[9])
        two.sink.ask(waits)
        assert began.wait(WAIT_S)
        two.sink.weights_changed()
        goes_on.set()
        until(lambda: waits.is_done)


def test_a_replica_that_there_is_not_is_named():
    with Two(replicas=2) as two:
        incoming = two.ask(4, [10], replica=5)
        until(lambda: incoming.is_done)
        assert incoming.failure  # nobody listens at its port
        two.open(4, [1])
        incoming = two.ask(4, [10])
        until(lambda: incoming.is_done)
        assert incoming.output is not None, "room 4 of 2 replicas is the first one's"
        two.open(5, [1])
        incoming = two.ask(5, [10], first=4)
        until(lambda: incoming.is_done)
        assert incoming.output is not None, "and so are the rooms of the other samples of its prompt"


def test_memory_is_only_that_which_a_server_of_this_user_made(tmp_path):
    (tmp_path / "x").write_bytes(bytes(10))
    assert Ring.attach(str(tmp_path / "x")) is None
    assert Ring.attach("/dev/shm/headrace-kv-../../etc/passwd") is None
    ring = Ring.create()
    other = Ring.attach(str(ring.path))
    assert other.divide(8 << 20)
    assert [other.take(5)[0] >> 20 for _ in range(4)] == [0, 8, 16, 24]
    assert not other.has_room
    other.give_back()
    assert other.has_room
    ring.close()
    assert Ring.attach(str(ring.path)) is None
    other.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_source_at_all_addresses_is_reached_over_ipv4_too():
    source = PageSource(Pages(1), ("::", 0), SECRET)
    try:
        socket.create_connection(("127.0.0.1", source.port)).close()
    finally:
        source.close()
