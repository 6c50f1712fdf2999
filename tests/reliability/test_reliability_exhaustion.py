"""Too few file descriptors, and a prompt that everybody else is shorter than: the server goes on, and nobody waits for ever."""

import contextlib
import socket
import threading

import httpx
import psutil
from reliability_harness import MAX_RUNNING, START_S, Server, greedy, wait_until

NUM_DESCRIPTORS = 128
NUM_CONNECTIONS = 300
NUM_SHORT = 2 * MAX_RUNNING


def test_a_server_without_file_descriptors_answers_again_when_there_are_some(server: Server):
    canary, before_log = server.canary(), len(server.log())
    process = psutil.Process(server.process.pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    with server.client() as old, contextlib.ExitStack() as crowd:
        assert old.get("/ping").status_code == 200
        process.rlimit(psutil.RLIMIT_NOFILE, (NUM_DESCRIPTORS, before[1]))
        for _ in range(NUM_CONNECTIONS):
            sock = crowd.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", httpx.URL(server.url).port))
        wait_until(lambda: process.num_fds() >= NUM_DESCRIPTORS - 1, "its descriptors are used up")
        assert old.get("/ping").status_code == 200, "who is connected is served"
        assert old.post("/generate", json={"text": "still", "sampling_params": greedy(4)}).status_code == 200
    process.rlimit(psutil.RLIMIT_NOFILE, before)

    def answers() -> bool:
        with server.client() as new, contextlib.suppress(httpx.HTTPError):
            return new.get("/health", timeout=2).status_code == 200
        return False

    wait_until(answers, "newcomers are served again", START_S)
    assert server.canary() == canary
    assert "Traceback" not in server.log()[before_log:], server.log()


def test_a_long_prompt_is_served_while_short_ones_never_stop_coming(server: Server):
    stop = threading.Event()
    served = [0] * NUM_SHORT

    def ask(i: int) -> None:
        with server.client() as client:
            while not stop.is_set():
                body = {"text": f"{i} {served[i]}", "sampling_params": greedy(16)}
                assert client.post("/generate", json=body).status_code == 200
                served[i] += 1

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(NUM_SHORT)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: min(served) > 1, "the short ones come", START_S)
        with server.client() as client:
            body = {"input_ids": [3 + i % 200 for i in range(900)], "sampling_params": greedy(16)}
            reply = client.post("/generate", json=body, timeout=START_S)
        others = sum(served)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert reply.status_code == 200
    assert reply.json()["meta_info"]["completion_tokens"] == 16
    assert others < 100 * NUM_SHORT, "it waited for very many who came later"
