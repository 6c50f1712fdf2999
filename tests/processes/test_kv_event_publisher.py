"""KV events over ZeroMQ, and their replay."""

import socket

import msgspec
import pytest

from headrace.config.kv_events import KVEventsConfig, check_pyzmq, read_kv_events
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from headrace.processes.kv_event_publisher import KVEventHistory
from kv_event_mirror import Mirror

WAIT_MS = 60_000


def block(number: int, parent: int | None = None) -> BlockStored:
    return BlockStored([number], parent, [number], 1)


def mirror_of(history: KVEventHistory, since: int) -> tuple[list[int], Mirror]:
    numbers, mirror = [], Mirror()
    for number, payload in history.since(since):
        numbers.append(number)
        mirror.apply(msgspec.msgpack.decode(payload)[1])
    return numbers, mirror


def test_what_a_history_no_longer_has_is_told_as_one_batch():
    history = KVEventHistory(2)
    turns = [
        [AllBlocksCleared(), block(1), BlockStored([2, 3], 1, [2, 3], 1)],
        [BlockRemoved([3])],
        [block(4, 2), BlockRemoved([4])],
        [block(5)],
        [BlockRemoved([2])],
    ]
    for number, events in enumerate(turns):
        history.add(number, KVEventBatch(0.0, events, 0))

    numbers, mirror = mirror_of(history, 0)
    assert numbers == [2, 3, 4]
    assert mirror.blocks.keys() == {1, 5}
    assert [number for number, _ in history.since(3)] == [3, 4]
    assert [number for number, _ in history.since(5)] == []


def test_a_payload_is_an_array_of_time_events_as_maps_and_replica():
    payload = KVEventHistory(1).add(0, KVEventBatch(2.5, [block(7), BlockRemoved([7]), AllBlocksCleared()], 3))

    ts, events, rank = msgspec.msgpack.decode(payload)
    assert (ts, rank) == (2.5, 3)
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [7],
        "block_size": 1,
        "lora_id": None,
        "medium": None,
        "lora_name": None,
        "cache_salt": None,
        "extra_key": None,
        "key_name": None,
    }
    assert events[1:] == [
        {"type": "BlockRemoved", "block_hashes": [7], "medium": None},
        {"type": "AllBlocksCleared"},
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "truncated"),
        ("{}", "needs an endpoint"),
        ('{"endpoint": "ipc:///tmp/x"}', "tcp://ADDRESS:PORT"),
        ('{"endpoint": "tcp://127.0.0.1"}', "tcp://ADDRESS:PORT"),
        ('{"endpoint": "tcp://127.0.0.1:0"}', "tcp://ADDRESS:PORT"),
        ('{"endpoint": "tcp://127.0.0.1:65535"}', "each of 2 replicas needs a port"),
        ('{"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}', "at least 2 apart"),
        ('{"endpoint": "tcp://127.0.0.1:5557", "buffer_steps": 0}', "buffer_steps must be at least 1"),
        ('{"endpoint": "tcp://127.0.0.1:5557", "publisher": "kafka"}', "publisher"),
        ('{"endpoint": "tcp://127.0.0.1:5557", "endpiont": "x"}', "endpiont"),
    ],
)
def test_what_cannot_work_is_refused(text, complaint):
    with pytest.raises(ConfigError, match=complaint) as refused:
        ServerArgs(kv_events_config=text, dp_size=2)
    assert "--kv-events-config" in refused.value.message


def test_without_a_prefix_cache_there_are_no_events():
    with pytest.raises(ConfigError, match="--disable-radix-cache"):
        ServerArgs(kv_events_config='{"endpoint": "tcp://127.0.0.1:5557"}', disable_radix_cache=True)


@pytest.mark.parametrize("off", ['{"enable_kv_cache_events": false}', '{"publisher": "null"}'])
def test_the_others_ways_to_say_off_are_understood(off):
    assert read_kv_events(off, 1) is None


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.0.0.1", True), ("[::1]", True), ("localhost", True), ("*", False), ("10.0.0.1", False)]
)
def test_whether_only_this_machine_can_subscribe_is_known(host, is_local):
    assert KVEventsConfig(f"tcp://{host}:5557").is_local == is_local


def test_a_missing_pyzmq_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        check_pyzmq()


# -- with sockets

zmq = pytest.importorskip("zmq")


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


def free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
def endpoints() -> tuple[str, str]:
    one, other = free_ports()
    return f"tcp://127.0.0.1:{one}", f"tcp://127.0.0.1:{other}"


@pytest.fixture
def publisher(endpoints):
    from headrace.processes.kv_event_publisher import KVEventPublisher

    made = KVEventPublisher(KVEventsConfig(*endpoints, topic="kv", max_queue_size=3), 0)
    yield made
    made.close()


def replayed(context, endpoint: str, since: int) -> list[tuple[int, bytes]]:
    """What a subscriber is told that asks for all messages from a number on."""
    got = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send_multipart([b"", since.to_bytes(8, "big")])
        while True:
            assert dealer.poll(WAIT_MS), "no reply"
            empty, number, payload = dealer.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert payload == b""
                return got
            got.append((int.from_bytes(number, "big"), payload))


def test_a_subscriber_gets_messages_and_replays_what_came_before(context, endpoints, publisher):
    publisher.start()
    with context.socket(zmq.SUB) as sub:
        sub.linger = 0
        sub.subscribe(b"kv")
        sub.connect(endpoints[0])
        number = 0
        while not sub.poll(50):  # a subscription takes a moment to arrive
            publisher.publish([block(number)])
            number += 1
        topic, sequence, payload = sub.recv_multipart()
    first = int.from_bytes(sequence, "big")
    assert topic == b"kv"
    assert msgspec.msgpack.decode(payload)[1][0]["block_hashes"] == [first]

    got = replayed(context, endpoints[1], 0)
    assert [each for each, _ in got] == list(range(number))
    assert got[first][1] == payload
    assert replayed(context, endpoints[1], number) == []


def test_what_is_no_request_is_ignored(context, endpoints, publisher):
    publisher.publish([AllBlocksCleared()])
    publisher.start()
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoints[1])
        for frames in ([b"x"], [b"", b"123"], [b"", b"12345678", b""]):
            dealer.send_multipart(frames)
        dealer.send_multipart([b"", bytes(8)])
        assert dealer.poll(WAIT_MS)
        assert dealer.recv_multipart()[1] == bytes(8)


def test_events_that_find_no_room_leave_a_gap(context, endpoints, publisher):
    for number in range(5):
        publisher.publish([block(number)])  # nothing is sent before the start
    publisher.start()
    while [each for each, _ in replayed(context, endpoints[1], 0)] != [0, 1, 2]:
        pass
    publisher.publish([BlockRemoved([3])])  # of a block that was never told
    while (got := [each for each, _ in replayed(context, endpoints[1], 0)]) == [0, 1, 2]:
        pass
    assert got == [0, 1, 2, 5]


def test_an_address_in_use_is_refused(endpoints, publisher):
    from headrace.processes.kv_event_publisher import KVEventPublisher

    with pytest.raises(ConfigError, match="cannot listen on tcp"):
        KVEventPublisher(KVEventsConfig(endpoints[0]), 0)
