"""Links between stages: order, whatever there is room for, and what becomes of a receiver whose sender is gone or has stopped."""

import socket
import struct
import threading

import pytest
import torch

from headrace.distributed.one_host import SocketReceiver, SocketSender, socket_link
from headrace.errors import ExecutionError

LIMIT_S = 60.0
SHAPES = [(1, 4), (0, 4), (3, 576), (2048, 1024), (2, 1), (700, 576)]


@pytest.fixture
def link():
    begin, end = socket_link()
    sender, receiver = SocketSender(begin, LIMIT_S), SocketReceiver(end, LIMIT_S)
    yield sender, receiver
    sender.close()
    receiver.close()


def hidden(index):
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(index))


def test_what_is_sent_arrives_in_order_though_nobody_receives_yet(link):
    sender, receiver = link
    for _ in range(2):
        for index in range(len(SHAPES)):
            sender.send(hidden(index))

    for _ in range(2):
        for index, (rows, _) in enumerate(SHAPES):
            assert torch.equal(receiver.receive(rows), hidden(index))


def test_ends_that_run_at_the_same_time(link):
    sender, receiver = link
    count = 300

    def send():
        for i in range(count):
            sender.send(torch.full((i % 50, 100), float(i)))

    thread = threading.Thread(target=send)
    thread.start()
    for i in range(count):
        assert torch.equal(receiver.receive(i % 50), torch.full((i % 50, 100), float(i)))
    thread.join()


def test_ranks_that_are_not_at_the_same_step_are_noticed(link):
    sender, receiver = link
    sender.send(torch.zeros(3, 8))
    with pytest.raises(ExecutionError, match="3 rows in place of 2"):
        receiver.receive(2)


def test_a_receiver_learns_that_the_sender_is_gone(link):
    sender, receiver = link
    sender.close()
    with pytest.raises(ExecutionError, match="the stage before is gone"):
        receiver.receive(1)
    with pytest.raises(ExecutionError, match="the next stage is gone"):
        sender.send(torch.zeros(1, 8))


def test_a_sender_learns_that_the_receiver_is_gone(link):
    sender, receiver = link
    receiver.close()
    with pytest.raises(ExecutionError, match="the next stage is gone"):
        sender.send(torch.zeros(1, 8))


def test_a_sender_that_computes_for_long_gives_signs_of_life():
    begin, end = socket_link()
    sender = SocketSender(begin, 0.01)
    signs = b""
    with socket.socket(fileno=end) as raw:
        raw.settimeout(LIMIT_S)
        while len(signs) < 100:
            signs += raw.recv(100)
        sender.send(torch.ones(1, 2))
        sender.close()
        while part := raw.recv(4096):
            signs += part
    message = struct.pack("<iiff", 1, 2, 1.0, 1.0)
    one_sign = signs[:8]
    assert signs.replace(one_sign, b"") == message


def test_a_receiver_skips_signs_of_life_and_gives_up_without_any():
    begin, end = socket_link()
    with socket.socket(fileno=begin) as raw:
        receiver = SocketReceiver(end, 0.2)
        raw.sendall(struct.pack("<ii", -1, -1) * 5 + struct.pack("<iif", 1, 1, 7.0))
        assert receiver.receive(1).tolist() == [[7.0]]
        raw.sendall(struct.pack("<ii", -1, -1))
        with pytest.raises(ExecutionError, match=r"the stage before has sent no heartbeat for 0.2 s"):
            receiver.receive(1)
        receiver.close()
