"""A pool asks children, replaces those that are lost, late or grown, and leaves nobody behind. What grammars and images add is tested with them."""

import os
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from headrace.child_pool.child_side import MIB
from headrace.child_pool.pool import ChildLateError, ChildLostError, ChildPool, child_environment
from headrace.errors import ExecutionError

CHILD = """
import os, msgspec
from headrace.child_pool.child_side import MIB, Frames, Ready, limit_memory, resident_bytes, run, say_no_more

class Question(msgspec.Struct):
    what: str
    data: bytes = b""

class Answer(msgspec.Struct):
    data: bytes
    left_bytes: int

def serve(frames):
    frames.receive(msgspec.msgpack.Decoder(Question))
    before, kept = resident_bytes(), []
    limit_memory(256 * MIB)
    frames.send(Ready())
    say_no_more()
    while True:
        question = frames.receive(msgspec.msgpack.Decoder(Question))
        if question.what == "end":
            os._exit(3)
        if question.what == "hang":
            while True: pass
        if question.what == "grow":
            kept.append(b"x" * (100 * MIB))
        if question.what == "explode":
            kept.append(b"x" * (300 * MIB))
        frames.send(Answer(question.data[::-1], max(resident_bytes() - before, 0)))

run(serve, 1 << 20, "echo")
"""


class Question(msgspec.Struct):
    what: str
    data: bytes = b""


class Answer(msgspec.Struct):
    data: bytes
    left_bytes: int


@pytest.fixture
def make():
    pools = []

    def make_pool(num_children: int = 1, limit_s: float = 60.0) -> ChildPool[Answer]:
        program = (sys.executable, "-c", CHILD)
        answers = msgspec.msgpack.Decoder(Answer)
        pools.append(
            ChildPool(
                "echo",
                program,
                Question("setup"),
                answers,
                num_children=num_children,
                limit_s=limit_s,
                max_left_bytes=64 * MIB,
            )
        )
        return pools[-1]

    yield make_pool
    for pool in pools:
        pool.close()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (20 << 20) + 1])
def test_messages_of_every_size_arrive_whole(make, size: int):
    pool = make()
    data = os.urandom(size)
    assert pool.ask(Question("echo", data)).data == data[::-1]


def test_a_child_is_kept_until_it_is_lost(make):
    pool = make()
    assert pool.pids == []
    pool.ask(Question("echo"))
    (first,) = pool.pids
    pool.ask(Question("echo"))
    assert pool.pids == [first]
    for what in ("end", "explode"):
        with pytest.raises(ChildLostError):
            pool.ask(Question(what))
        assert pool.pids == []
        assert pool.ask(Question("echo", b"ab")).data == b"ba"
    assert is_gone(first)
    assert pool.num_killed == 2


def test_a_child_that_is_late_is_ended(make):
    pool = make(limit_s=0.3)
    pool.ask(Question("echo"))
    (pid,) = pool.pids
    with pytest.raises(ChildLateError):
        pool.ask(Question("hang"))
    assert is_gone(pid)


def test_a_child_that_has_grown_is_replaced(make):
    pool = make()
    pool.ask(Question("grow"))
    assert pool.pids == []
    assert pool.num_killed == 0


def test_questions_of_several_threads_are_answered_each(make):
    pool = make(num_children=2)
    answers: dict[int, bytes] = {}

    def ask(number: int) -> None:
        answers[number] = pool.ask(Question("echo", b"%03d" % number)).data

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: (b"%03d" % number)[::-1] for number in range(40)}
    assert 1 <= len(pool.pids) <= 2


def test_a_closed_pool_has_no_children(make):
    pool = make()
    pool.ask(Question("echo"))
    (pid,) = pool.pids
    pool.close()
    assert is_gone(pid)
    with pytest.raises(ExecutionError, match="stopping"):
        pool.ask(Question("echo"))


def test_a_child_gets_no_secrets():
    assert child_environment({"HF_TOKEN": "x", "HOME": "/h"}).keys() & {"HF_TOKEN", "HOME"} == {"HOME"}
