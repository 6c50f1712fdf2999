"""Channels: both forms behave the same, bad frames harm nobody, the directory of the sockets is private and goes away."""

import asyncio
import fcntl
import os
import socket
import stat
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.messages.channel import IpcDir, LocalChannels, MessageCodec, Ports
from headrace.messages.control import AbortReq, FaultReq, Heartbeat, ShutdownReq
from headrace.messages.operations import OperationReply
from headrace.messages.outputs import BatchStrOut, FinishReason, LogprobBlock, SampleStats, StrOut, TokenIDOut
from headrace.messages.packing import pack_int32, unpack_float32, unpack_int32
from headrace.messages.requests import LogprobSpec, PromptContent, SampleTask, TokenizedGenerateReqInput
from headrace.messages.sockets import MAX_DATAGRAM_BYTES, SocketChannels
from headrace.sampling.params import ResolvedSamplingParams

REQUEST = TokenizedGenerateReqInput(
    rid="répétition-🚰",
    content=PromptContent(pack_int32([1, 2, 2**31 - 1])),
    task=SampleTask(
        ResolvedSamplingParams(max_new_tokens=5, seed=2**63 - 1, stop=("a", "b"), logit_bias=((3, -1.5),)),
        stream=True,
        logprobs=LogprobSpec(2, 3, (4, 5)),
    ),
    namespace='["k", ""]',
    deadline_s=1e9,
)
REQUEST_FRAME = MessageCodec().encode(REQUEST)
TOKENS = TokenIDOut(
    "a",
    b"\x01\0\0\0",
    1,
    FinishReason("stop", matched=7),
    stats=SampleStats(3, 1),
    logprobs=LogprobBlock(b"1234"),
)
OUTPUT = BatchStrOut(
    (
        StrOut("text", TOKENS),
        StrOut("", TokenIDOut("b", b"", 0, FinishReason("abort", message="no", status_code=503))),
    )
)


@pytest.fixture(params=["sockets", "local"])
def channels(request, tmp_path):
    made = SocketChannels(Ports.in_directory(tmp_path)) if request.param == "sockets" else LocalChannels()
    yield made
    made.close()


def test_messages_arrive_whole_and_in_order(channels):
    receiver = channels.receiver("to_scheduler")
    sender = channels.sender("to_scheduler")
    messages = [REQUEST, OUTPUT, AbortReq(("x",)), ShutdownReq()]

    for message in messages:
        sender.send(message)

    assert [receiver.recv(5.0) for _ in messages] == messages
    assert receiver.recv_nowait() is None


def test_receiving_gives_up_after_the_timeout(channels):
    assert channels.receiver("to_tokenizer").recv(0.01) is None


def test_several_senders_reach_one_receiver(channels):
    receiver = channels.receiver("to_tokenizer")
    for name in ("scheduler", "detokenizer"):
        channels.sender("to_tokenizer").send(Heartbeat(name))

    assert {receiver.recv(5.0).process for _ in range(2)} == {"scheduler", "detokenizer"}


async def test_a_loop_that_listens_gets_everything_sent_from_another_thread(channels):
    receiver = channels.receiver("to_tokenizer")
    sender = channels.sender("to_tokenizer")
    sender.send(OperationReply(0))
    ids, whole = [], asyncio.Event()

    def take(message):
        ids.append(message.id)
        if len(ids) == 500:
            whole.set()

    receiver.listen(take)
    thread = threading.Thread(target=lambda: [sender.send(OperationReply(i)) for i in range(1, 500)])
    thread.start()
    async with asyncio.timeout(20):
        await whole.wait()

    thread.join()
    assert ids == list(range(500))
    receiver.close()


def test_closing_twice_and_sending_after_close_do_nothing(channels):
    sender = channels.sender("to_scheduler")
    receiver = channels.receiver("to_scheduler")
    for end in (sender, sender, receiver, receiver):
        end.close()

    sender.send(ShutdownReq())


def test_a_sender_never_waits_and_the_rest_arrives_in_order_once_there_is_a_receiver(tmp_path):
    channels = SocketChannels(Ports.in_directory(tmp_path))
    sender = channels.sender("to_scheduler")
    for i in range(500):
        sender.send(OperationReply(i))

    receiver = channels.receiver("to_scheduler")
    first = receiver.recv(5.0)
    for i in range(500, 1000):  # more than a socket holds
        sender.send(OperationReply(i))

    assert [first.id, *(receiver.recv(5.0).id for _ in range(999))] == list(range(1000))
    channels.close()


def test_a_message_of_any_size_arrives_in_its_place(channels):
    receiver = channels.receiver("to_tokenizer")
    sender = channels.sender("to_tokenizer")
    sizes = [1, MAX_DATAGRAM_BYTES - 100, MAX_DATAGRAM_BYTES, 5_000_000, 1]
    for size in sizes:
        sender.send(Heartbeat("x" * size))

    assert [len(receiver.recv(5.0).process) for _ in sizes] == sizes


def test_the_next_life_of_a_receiver_gets_what_is_sent_after_the_end_of_the_first(tmp_path):
    channels = SocketChannels(Ports.in_directory(tmp_path))
    sender = channels.sender("to_scheduler")
    first = channels.receiver("to_scheduler")
    sender.send(Heartbeat("first"))
    assert first.recv(5.0) == Heartbeat("first")
    first.close()

    sender.send(Heartbeat("second"))
    sender.send(Heartbeat("third"))
    second = channels.receiver("to_scheduler")

    assert [second.recv(5.0), second.recv(5.0)] == [Heartbeat("second"), Heartbeat("third")]
    channels.close()


def bad_frames():
    good = MessageCodec().encode(REQUEST)
    return [
        b"",
        b"\xc1",
        b"\x80\x04\x95.",  # the beginning of a pickle
        good[:-1],
        good + b"\x00",
        msgspec.msgpack.encode(["NoSuchMessage", 1]),
        msgspec.msgpack.encode({"type": "AbortReq"}),
        msgspec.msgpack.encode(["Heartbeat", 17]),
        msgspec.msgpack.encode(["Heartbeat"]),
        b"\x92\xa9Heartbeat\xa1\xff",  # a string that is not UTF-8
        b"\x91" * 30_000,  # nested
    ]


def test_malformed_frames_are_dropped_and_counted(tmp_path):
    ports = Ports.in_directory(tmp_path)
    channels = SocketChannels(ports)
    receiver = channels.receiver("to_scheduler")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(ports.to_scheduler)
        sending = threading.Thread(target=lambda: [stranger.send(frame) for frame in [*bad_frames(), REQUEST_FRAME]])
        sending.start()

        assert receiver.recv(5.0) == REQUEST
        sending.join()
    assert receiver.dropped_frames == len(bad_frames())
    channels.close()


def test_a_descriptor_that_is_no_file_is_a_malformed_frame_and_is_closed(tmp_path):
    ports = Ports.in_directory(tmp_path)
    channels = SocketChannels(ports)
    receiver = channels.receiver("to_scheduler")
    num_open = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(ports.to_scheduler)
        ends = os.pipe()
        socket.send_fds(stranger, [b""], [ends[0]])
        for end in ends:
            os.close(end)
        stranger.send(REQUEST_FRAME)

        assert receiver.recv(5.0) == REQUEST
    assert receiver.dropped_frames == 1
    assert len(os.listdir("/proc/self/fd")) == num_open
    channels.close()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_no_bytes_make_the_codec_raise(noise, at, value):
    codec = MessageCodec()
    flipped = bytearray(codec.encode(OUTPUT))
    flipped[at % len(flipped)] = value

    codec.decode(noise)
    codec.decode(bytes(flipped))


def test_every_field_survives_the_wire():
    codec = MessageCodec()
    for message in (REQUEST, OUTPUT, FaultReq("sampling", "sleep", "r", 3, 0.5)):
        assert codec.decode(codec.encode(message)) == message


def test_the_directory_is_private_and_removed():
    with IpcDir() as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        channels = SocketChannels(Ports.in_directory(path))
        channels.receiver("to_scheduler")
        assert (path / "to_scheduler").is_socket()
        channels.close()
    assert not path.exists()


def test_directories_of_dead_owners_are_removed_and_those_of_living_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    abandoned, alive, starting = (tmp_path / f"headrace-ipc-{name}" for name in ("dead", "alive", "starting"))
    for path in (abandoned, alive, starting):
        path.mkdir()
    (abandoned / "lock").touch()
    (alive / "lock").touch()
    lock_fd = os.open(alive / "lock", os.O_RDWR)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)

    with IpcDir():
        assert not abandoned.exists()
        assert alive.exists()
        assert starting.exists()
    os.close(lock_fd)


def test_a_temporary_directory_that_cannot_be_used_is_a_config_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="TMPDIR"), IpcDir():
        pass
    with pytest.raises(ConfigError, match="too long"):
        Ports.in_directory(tmp_path / ("x" * 120))


def test_packed_numbers_are_little_endian_and_come_back():
    assert pack_int32([1, -2]) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert unpack_int32(pack_int32([1, -2])) == [1, -2]
    assert unpack_float32(b"\0\0\x80\x3f") == [1.0]
    with pytest.raises(ValueError):
        unpack_int32(b"123")
