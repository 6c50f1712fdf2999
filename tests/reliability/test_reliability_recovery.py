"""A scheduler or detokenizer that dies is restarted, and its clients see no difference in their replies."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from reliability_harness import START_S, Server, Stream, check_refused, greedy, is_taken, wait_until

NUM_TOKENS = 200
HELD_AT = 100
"""All wait here, in a step that takes longer than any test, until somebody kills the scheduler."""
LONG_STEP_S = 300.0
PROMPTS = [f"The {i}th of eight sings: " for i in range(8)]
SEEDED = {"max_new_tokens": NUM_TOKENS, "temperature": 0.9, "seed": 5, "ignore_eos": True, "frequency_penalty": 0.3}


def body_of(i: int) -> dict[str, Any]:
    sampling = SEEDED if i % 4 == 1 else greedy(NUM_TOKENS)
    return {"text": PROMPTS[i], "rid": f"sings-{i}", "sampling_params": sampling, "return_logprob": i % 4 == 2}


def answer(reply: dict[str, Any]) -> dict[str, Any]:
    """What must be the same."""
    meta = reply["meta_info"]
    names = ("prompt_tokens", "completion_tokens", "finish_reason", "output_token_logprobs")
    return {"text": reply["text"], "ids": reply["output_ids"]} | {name: meta.get(name) for name in names}


def num_tokens(stream: Stream) -> int:
    """How many have come so far. Chunks may carry several."""
    return stream.last["meta_info"]["completion_tokens"] if stream.payloads else 0


class Choir:
    """A server and eight requests, every second a stream, and their undisturbed answers."""

    def __init__(self, server: Server, want: list[dict[str, Any]]) -> None:
        self.server = server
        self.client = server.client()
        self.want = want
        self.streams: list[Stream] = []

    def child(self, kind: str) -> psutil.Process | None:
        """The process of this kind that lives now."""
        for process in self.server.process.children():
            try:
                if kind in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    return process
            except psutil.Error:
                continue
        return None

    def begin(self, held_at: int = HELD_AT, seconds: float = LONG_STEP_S) -> None:
        """Until all are in flight and the first waits in its long step."""
        self.server.inject("forward", "sleep", "sings-0", at_token=held_at, seconds=seconds)
        self.streams = [Stream(self.client, "/generate", body_of(i), stream=i % 2 == 0) for i in range(8)]
        wait_until(lambda: all(is_taken(self.client, f"sings-{i}") for i in range(8)), "all have arrived", START_S)
        if held_at:
            # With steps overlapped, the last token before the long step may still be under way.
            wait_until(lambda: num_tokens(self.streams[0]) >= held_at - 2, "the first waits", START_S)

    def kill(self, kind: str, number: int = signal.SIGKILL) -> psutil.Process:
        process = self.child(kind)
        assert process is not None
        process.send_signal(number)
        return process

    def check_answers(self) -> None:
        for stream in self.streams:
            stream.join(START_S)
        assert [stream.status for stream in self.streams] == [200] * 8
        assert [answer(stream.last) for stream in self.streams] == self.want

    def wait_healthy(self) -> None:
        wait_until(lambda: self.client.get("/health").status_code == 200, "it is healthy", START_S)

    def scheduler_restarts(self) -> float:
        """As the metrics count them; the counters have those of the detokenizer, too."""
        metrics = self.client.get("/metrics").text
        return sum(
            float(count)
            for count in re.findall(r'^headrace:restarts_total\{.*process="scheduler"\} (.*)$', metrics, re.M)
        )

    def counters(self) -> dict[str, int]:
        return dict(self.server.state()["frontend"])


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    """Told to stop it drains, however often it has been restarted."""
    with Server(tiny_model, ("--max-restarts", "50")) as server:
        yield server.wait_started()
        check_that_it_drains(server)


@pytest.fixture(scope="module")
def want(server: Server) -> list[dict[str, Any]]:
    """What the eight answer when nothing dies."""
    return undisturbed(server)


def undisturbed(server: Server) -> list[dict[str, Any]]:
    with server.client() as client:
        return [answer(client.post("/generate", json=body_of(i)).json()) for i in range(8)]


@pytest.fixture
def choir(server: Server, want: list[dict[str, Any]]) -> Iterator[Choir]:
    """Afterwards everything is as it was: idle, and the memory accounted for."""
    choir = Choir(server, want)
    yield choir
    choir.wait_healthy()
    wait_until(lambda: server.state()["num_running"] == 0, "idle")
    pool = server.state()["pool"]
    assert pool["consistent"]
    assert pool["free_tokens"] + pool["evictable_tokens"] == pool["total_tokens"]
    assert choir.counters()["num_held"] == 0
    assert len(server.engine_children()) == 2
    assert len(server.ipc_directories()) == 1
    choir.client.close()


@pytest.mark.parametrize("held_at", [HELD_AT, 0], ids=["in decode", "in prefill"])
def test_answers_are_the_same_when_the_scheduler_dies(choir: Choir, held_at: int):
    before, restarts = choir.counters(), choir.scheduler_restarts()
    choir.begin(held_at)
    choir.kill("scheduler")
    wait_until(lambda: choir.client.get("/health").status_code == 503, "the death is noticed")
    assert choir.client.get("/ready").status_code == 503
    assert choir.client.get("/ping").status_code == 200
    late = Stream(choir.client, "/generate", {"text": "late", "sampling_params": greedy(4)}, stream=False)

    choir.check_answers()

    late.join(START_S)
    assert late.last["meta_info"]["completion_tokens"] == 4, "new requests wait"
    after = choir.counters()
    assert after["num_restarts"] == before["num_restarts"] + 1
    assert after["num_replayed"] == before["num_replayed"] + 8
    assert choir.scheduler_restarts() == restarts + 1
    metrics = choir.client.get("/metrics").text
    assert f'headrace:replayed_requests_total{{model_name="tiny-llama"}} {after["num_replayed"]}' in metrics


def test_a_scheduler_that_dies_while_it_starts_is_started_again(choir: Choir):
    choir.begin()
    first = choir.kill("scheduler", signal.SIGABRT)
    wait_until(lambda: (child := choir.child("scheduler")) is not None and child.pid != first.pid, "it is started")
    choir.kill("scheduler")

    choir.check_answers()


def test_both_die_at_once(choir: Choir):
    choir.begin()
    choir.kill("scheduler")
    choir.kill("detokenizer")

    choir.check_answers()


def test_a_stopped_scheduler_is_not_dead(choir: Choir):
    restarts = choir.counters()["num_restarts"]
    streams = [Stream(choir.client, "/generate", body_of(i), stream=True) for i in range(8)]
    choir.streams = streams
    assert streams[0].began.wait(START_S)
    stopped = choir.kill("scheduler", signal.SIGSTOP)
    wait_until(lambda: choir.client.get("/health").status_code == 503, "the silence is noticed")
    stopped.send_signal(signal.SIGCONT)

    choir.check_answers()
    choir.wait_healthy()
    assert choir.counters()["num_restarts"] == restarts


def test_a_request_that_kills_is_given_up_alone(choir: Choir):
    before = choir.counters()
    choir.server.inject("forward", "crash", "poison", at_token=30)
    streams = [Stream(choir.client, "/generate", body_of(i), stream=i % 2 == 0) for i in range(8)]
    poison = Stream(
        choir.client, "/generate", {"text": "x", "rid": "poison", "sampling_params": greedy(NUM_TOKENS)}, stream=False
    )
    choir.streams = streams

    poison.join(START_S)
    choir.check_answers()

    choir.wait_healthy()
    assert poison.status == 500
    assert "cancelled" in json.loads(poison.payloads[0])["error"]["message"]
    assert choir.counters()["num_given_up"] == before["num_given_up"] + 1


def test_answers_are_the_same_when_the_detokenizer_dies(tiny_model: Path, want: list[dict[str, Any]]):
    # The step that all wait in does not end here: nobody kills the scheduler. A short one is long enough.
    with Server(tiny_model, ("--max-restarts", "1")) as server:
        choir = Choir(server.wait_started(), want)
        server.inject("forward", "sleep", "sings-0", at_token=HELD_AT, seconds=3.0)
        choir.streams = [Stream(choir.client, "/generate", body_of(i), stream=i % 2 == 0) for i in range(8)]
        wait_until(lambda: num_tokens(choir.streams[0]) >= HELD_AT - 2, "the first waits", START_S)
        scheduler = choir.child("scheduler")
        choir.kill("detokenizer")

        choir.check_answers()

        choir.wait_healthy()
        assert choir.child("scheduler") == scheduler
        assert choir.counters()["num_replayed"] == 8
        check_the_end_of_a_loop(server, choir)


def test_answers_are_the_same_when_the_main_process_makes_the_text(tiny_model: Path, want: list[dict[str, Any]]):
    with Server(tiny_model, ("--detokenize-in", "main")) as server:
        alone = Choir(server.wait_started(), want)
        assert alone.child("detokenizer") is None

        alone.begin()
        alone.kill("scheduler")
        alone.check_answers()

        alone.wait_healthy()
        assert alone.counters()["num_replayed"] == 8
        alone.client.close()


def test_a_scheduler_that_dies_compiles_grammars_again_and_goes_on(choir: Choir):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 60, "maxItems": 60}
    params = {"max_new_tokens": 400, "temperature": 1.0, "seed": 4, "json_schema": schema}
    body = {"text": "hi", "sampling_params": params}
    want = choir.client.post("/generate", json=body).json()["text"]
    assert len(json.loads(want)) == 60
    stream = Stream(choir.client, "/generate", body)
    stream.began.wait(START_S)
    choir.kill("scheduler")
    stream.join()
    assert not stream.has_error, stream.payloads[-1]
    assert stream.last["text"] == want


def check_that_it_drains(server: Server) -> None:
    """Newcomers are refused, who is in flight is answered, then it goes and leaves nothing."""
    choir = Choir(server, undisturbed(server))
    choir.begin(seconds=5.0)
    server.children = server.engine_children()
    server.popen.terminate()
    wait_until(lambda: choir.client.get("/ready").status_code == 503, "newcomers are not welcome")
    refused = choir.client.post("/generate", json={"text": "late"})
    check_refused(refused, 503)
    assert int(refused.headers["retry-after"]) >= 1
    assert choir.client.get("/health").status_code == 200
    choir.check_answers()
    assert server.wait() == 0
    assert len(server.children) == 2
    check_nothing_is_left(server)
    choir.client.close()


def check_nothing_is_left(server: Server) -> None:
    """Once it has ended: of its processes, its files and its errors."""
    _, alive = psutil.wait_procs([server.process, *server.children], timeout=10)
    assert not alive
    assert [path.name for path in server.folder.iterdir()] == ["log"]
    assert "Traceback" not in server.log(), server.log()


def check_the_end_of_a_loop(server: Server, choir: Choir) -> None:
    """One restart was allowed: the next death is the end, for every waiter and the process."""
    choir.begin()
    server.children = server.engine_children()
    choir.kill("scheduler")
    for stream in choir.streams:
        stream.join()
    assert all(stream.has_error for stream in choir.streams)
    assert server.wait() == 1
    check_nothing_is_left(server)
    choir.client.close()
