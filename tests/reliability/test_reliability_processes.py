"""Processes that die or are told to go: every waiter is answered, nothing is left behind, the exit code tells."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from reliability_harness import START_S, Server, Stream, greedy, is_taken, wait_until

LONG_STEP_S = 30.0


@pytest.fixture
def fresh(tiny_model: Path) -> Iterator[Server]:
    """A server of the test's own, without warm-up and without keys."""
    with Server(tiny_model) as server:
        yield server


def eight_in_flight(server: Server, client: httpx.Client, seconds: float) -> list[Stream]:
    """Eight requests, every second one a stream, the first in a step that takes `seconds`."""
    server.inject("forward", "sleep", "holds", at_token=2, seconds=seconds)
    first = Stream(client, "/generate", {"text": "a", "rid": "holds", "sampling_params": greedy(30)})
    assert first.began.wait(START_S)
    others = [{"text": f"{i}", "rid": f"{i}", "sampling_params": greedy(30)} for i in range(7)]
    streams = [Stream(client, "/generate", body, stream=i % 2 == 1) for i, body in enumerate(others)]
    wait_until(lambda: all(is_taken(client, f"{i}") for i in range(7)), "all have arrived")
    return [first, *streams]


def assert_nothing_is_left(server: Server) -> None:
    gone, alive = psutil.wait_procs([server.process, *server.children], timeout=10)
    assert not alive, alive
    assert len(gone) == 3
    assert server.ipc_directories() == []
    assert [path.name for path in server.folder.iterdir()] == ["log"]


def test_without_recovery_a_child_that_dies_is_an_error_to_every_waiter_and_the_end(tiny_model: Path):
    with Server(tiny_model, ("--disable-recovery",)) as fresh:
        fresh.wait_started()
        with fresh.client() as client:
            streams = eight_in_flight(fresh, client, LONG_STEP_S)
            child = next(process for process in fresh.children if "detokenizer" in process.cmdline())

            child.send_signal(signal.SIGABRT)
            died_s = time.monotonic()
            for stream in streams:
                stream.join()
            answered_s = time.monotonic() - died_s

        # 3 s are promised; the tenfold is for a busy machine, and still shorter than any timeout of ours.
        assert answered_s < 30
        assert all(stream.has_error for stream in streams), [stream.payloads for stream in streams]
        assert fresh.wait() == 1
        assert_nothing_is_left(fresh)
        assert "Traceback" not in fresh.log(), fresh.log()


def test_children_do_not_outlive_their_parent(fresh: Server):
    fresh.wait_started()
    with fresh.client() as client:
        streams = eight_in_flight(fresh, client, LONG_STEP_S)
        fresh.process.kill()
        _, alive = psutil.wait_procs(fresh.children, timeout=10)
        for stream in streams:
            stream.join()
    assert not alive
    assert fresh.wait() == -signal.SIGKILL


def test_told_twice_it_goes_at_once(fresh: Server):
    fresh.wait_started()
    with fresh.client() as client:
        streams = eight_in_flight(fresh, client, LONG_STEP_S)
        fresh.popen.terminate()
        wait_until(lambda: client.get("/ready").status_code == 503, "it drains")
        assert fresh.popen.poll() is None
        fresh.popen.terminate()
        # Shorter than the step that the drain would have waited for.
        fresh.wait(LONG_STEP_S / 2)
        for stream in streams:
            stream.join()
    assert_nothing_is_left(fresh)
    assert "Traceback" not in fresh.log(), fresh.log()


def test_told_to_stop_while_starting_it_goes(fresh: Server):
    wait_until(lambda: len(fresh.engine_children()) == 2, "the children have been started", START_S)
    fresh.children = fresh.engine_children()
    assert fresh.stop() == 0
    assert not fresh.url
    assert_nothing_is_left(fresh)
    assert "Traceback" not in fresh.log(), fresh.log()


def test_a_port_in_use_is_one_clear_line(server: Server, tiny_model: Path):
    port = server.url.rpartition(":")[2]
    with Server(tiny_model, ("--port", port, "--log-level", "warning")) as second:
        assert second.wait(START_S) == 2
        (line,) = second.log().splitlines()
    assert port in line
    assert "cannot listen" in line
