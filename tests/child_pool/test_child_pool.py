"""A pool asks children, replaces those that are lost, late or grown, and leaves nobody behind. What grammars and images add is tested with them."""

import os
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from headrace.child_pool import pool as pool_module
from headrace.child_pool.child_side import MIB
from headrace.child_pool.pool import ChildLateError, ChildLostError, ChildPool, child_environment, worked_s
from headrace.errors import CapacityError, ExecutionError

CHILD = """
import os, signal, threading, time, msgspec
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
        if question.what == "loop":
            while True: pass
        if question.what == "hang" and os.path.exists(question.data):
            open(question.data, "w").close()  # a pipe with a name: it says that the child is here
            threading.Event().wait()
        if question.what == "wait":
            threading.Event().wait()
        if question.what == "work":
            until_s = time.process_time() + question.data[0] / 100
            while time.process_time() < until_s: pass
        if question.what == "signal":
            signal.raise_signal(question.data[0])
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

    def make_pool(num_children: int = 1, limit_s: float = 60.0, start_after_s: float = 0.0) -> ChildPool[Answer]:
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
                start_after_s=start_after_s,
            )
        )
        return pools[-1]

    yield make_pool
    for pool in pools:
        pool.close()


def until(condition) -> None:
    while not condition():
        time.sleep(0.001)


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
    crashes = [Question("signal", bytes([number])) for number in (signal.SIGABRT, signal.SIGSEGV)]
    for bad in (Question("end"), Question("explode"), *crashes):
        with pytest.raises(ChildLostError):
            pool.ask(bad)
        assert pool.pids == []
        assert pool.ask(Question("echo", b"ab")).data == b"ba"
    assert is_gone(first)
    assert pool.num_killed == 4


def test_a_child_is_made_ready_unless_there_is_one(make):
    pool = make(num_children=2)
    for _ in range(2):
        pool.make_ready()
        assert len(pool.pids) == 1
    (pid,) = pool.pids
    pool.ask(Question("echo"))
    assert pool.pids == [pid]
    pool.close()
    pool.make_ready()
    assert pool.pids == []


def test_large_questions_leave_a_child_ready(make):
    """Also when they end their children."""
    pool = make(num_children=2)
    pool.ask(Question("echo"))
    pool.ask(Question("echo"), is_large=True)
    until(lambda: pool.ready_pid is not None)
    ready = pool.ready_pid
    for _ in range(2):
        with pytest.raises(ChildLostError):
            pool.ask(Question("end"), is_large=True)
        assert pool.pids == [ready]
        pool.ask(Question("echo"))
        assert pool.pids == [ready]
    with pytest.raises(ChildLostError):
        pool.ask(Question("end"))
    pool.ask(Question("echo"), is_large=True)
    until(lambda: len(pool.pids) == 2)


def test_another_child_is_started_only_when_the_first_works_for_long(make, pipe):
    pool = make(num_children=2, start_after_s=60.0)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(pool.ask, [Question("work", bytes([1]))] * 8))
    assert len(pool.pids) == 1

    pool = make(num_children=2, start_after_s=0.1)
    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(pool.ask, Question("hang", bytes(pipe)))
        pipe.read_bytes()  # returns when the child has opened and closed its end
        assert pool.ask(Question("echo", b"ab")).data == b"ba"
        assert len(pool.pids) == 2
        pool.close()
        with pytest.raises(ExecutionError):
            stuck.result()


def test_a_thread_is_told_what_its_questions_have_cost(make):
    pool = make()
    begun_s = worked_s()
    pool.ask(Question("work", bytes([10])))
    assert worked_s() - begun_s >= 0.1
    with ThreadPoolExecutor(1) as other:
        own_s = other.submit(worked_s).result()
    assert own_s < worked_s() - begun_s


def test_a_child_that_is_late_is_ended(make):
    pool = make(limit_s=0.3)
    pool.ask(Question("echo"))
    (pid,) = pool.pids
    with pytest.raises(ChildLateError):
        pool.ask(Question("loop"))
    assert is_gone(pid)
    assert pool.num_killed == 1


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def kill_at_work(pool: ChildPool[Answer], pipe: Path) -> None:
    pipe.read_bytes()  # returns when the child has opened and closed its end
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)


def test_a_question_whose_child_is_killed_is_asked_again(make, pipe):
    pool = make()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(pool.ask, Question("hang", bytes(pipe)))
        kill_at_work(pool, pipe)
        pipe.unlink()
        assert answer.result().data == bytes(pipe)[::-1]
    assert pool.num_killed == 1


def test_two_killed_children_are_not_the_fault_of_the_question(make, pipe):
    pool = make()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(pool.ask, Question("hang", bytes(pipe)))
        kill_at_work(pool, pipe)
        kill_at_work(pool, pipe)
        with pytest.raises(CapacityError, match="killed") as refused:
            answer.result()
    assert refused.value.status_code == 503
    assert refused.value.retry_after_s > 0
    pipe.unlink()
    assert pool.ask(Question("hang", bytes(pipe))).data == bytes(pipe)[::-1]
    assert pool.num_killed == 2


def test_a_child_that_gets_no_turn_is_not_the_fault_of_the_question(make, monkeypatch):
    monkeypatch.setattr(pool_module, "PATIENCE", 1)
    pool = make(limit_s=0.5)
    with pytest.raises(CapacityError, match="try again"):
        pool.ask(Question("wait"))
    assert pool.pids == []
    assert pool.num_killed == 2


def test_a_child_that_is_killed_while_it_starts_is_started_again(make, tmp_path, monkeypatch):
    flag = tmp_path / "flag"
    killed = (
        f"import os\nif not os.path.exists({str(flag)!r}):\n    open({str(flag)!r}, 'w')\n    os.kill(os.getpid(), 9)\n"
    )
    pool = make()
    monkeypatch.setattr(pool, "_program", (sys.executable, "-c", killed + CHILD))
    assert pool.ask(Question("echo", b"ab")).data == b"ba"
    assert flag.exists()


def test_the_limit_of_a_question_is_no_inherited_one(make):
    pool = make(limit_s=3)
    pool.ask(Question("echo"))
    (pid,) = pool.pids
    resource.prlimit(pid, resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY))
    with pytest.raises(ChildLateError):  # after SIGXCPU has come
        pool.ask(Question("loop"))


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
