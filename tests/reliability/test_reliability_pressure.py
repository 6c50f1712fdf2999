"""More work than fits: everything that was taken is finished right, the rest is refused politely, and health stays quick."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from reliability_harness import (
    ANSWER_S,
    MAX_QUEUED,
    MAX_RUNNING,
    MODEL,
    Oracle,
    Server,
    Stream,
    check_refused,
    each_at_once,
    events,
    greedy,
    wait_until,
)

PROMPT_TOKENS = 64
NUM_PROMPTS = 10
"""More than run at once."""


@pytest.mark.parametrize(
    "oracle, output_tokens",
    [
        # Eight at once want 2,240 slots of 2,048; with the reference backend, which is slow, 1,376 of 1,024.
        ((), 216),
        (("--disable-radix-cache",), 216),
        (("--page-size", "1", "--attention-backend", "torch_native", "--max-total-tokens", "1024"), 108),
    ],
    ids=["pages of 16", "no cache", "pages of 1"],
    indirect=["oracle"],
)
def test_a_full_kv_cache_changes_nothing_but_time(
    server: Server, client: httpx.Client, oracle: Oracle, output_tokens: int
):
    prompts = [[3 + (7 * i + j * j) % 300 for j in range(PROMPT_TOKENS)] for i in range(NUM_PROMPTS)]
    alone = [server.generate(client, prompt, output_tokens)["output_ids"] for prompt in prompts]
    server.flush()
    before = server.state()["num_retracted"]

    # They begin together: those that come one after the other end one after the other, and never want all at once.
    assert server.admin.post("/pause_generation", json={"mode": "retract"}).json()["success"]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(each_at_once, lambda prompt: server.generate(client, prompt, output_tokens), prompts)
        wait_until(lambda: server.state()["num_waiting"] == len(prompts), "all wait")
        assert server.admin.post("/continue_generation", json={}).json()["success"]
        together = sent.result()

    assert [reply["output_ids"] for reply in together] == alone
    assert server.state()["num_retracted"] > before
    assert sum(reply["meta_info"]["num_retractions"] for reply in together) == server.state()["num_retracted"] - before


def test_concurrent_requests_never_see_each_other(server: Server, client: httpx.Client, oracle: Oracle):
    randomness = random.Random(35)
    prompts = []
    for i in range(32):
        unique = [3 + i, *(randomness.randrange(3, 300) for _ in range(randomness.randrange(5, 60)))]
        # Half of them go on alike, so that only the beginning tells them apart; most are longer than a chunk.
        prompts.append(unique + ([9] * 150 if i % 2 else [randomness.randrange(3, 300) for _ in range(150)]))
    alone = []
    for prompt in prompts:
        server.flush()
        alone.append(server.generate(client, prompt, 16)["output_ids"])

    for _ in range(2):  # cold, then with what is left of the first round in the cache
        together = each_at_once(lambda prompt: server.generate(client, prompt, 16), prompts)
        assert [reply["output_ids"] for reply in together] == alone
    assert server.state()["cached_tokens"] > 0


def test_a_full_queue_is_503_with_retry_after(server: Server, client: httpx.Client):
    def send(i: int) -> httpx.Response:
        return client.post("/generate", json={"input_ids": [5, 6, i], "sampling_params": greedy(2)})

    # One running slot is the holder's; the others are free, and what takes them does not wait.
    room, too_many = MAX_RUNNING - 1 + MAX_QUEUED, 16
    with server.held(client, 3.0):
        replies = each_at_once(send, range(room + too_many), workers=room + too_many)

    refused = [reply for reply in replies if reply.status_code != 200]
    assert 0 < len(refused) <= too_many  # fewer when the held step ended before all had arrived
    for reply in refused:
        error = check_refused(reply, 503)
        assert error["type"] == "overloaded_error"
        assert int(reply.headers["retry-after"]) >= 1
    # More than the queue can ever hold is no matter of waiting.
    body = {"text": ["x"] * (room + 2), "sampling_params": greedy(1)}
    check_refused(client.post("/generate", json=body))


@pytest.mark.parametrize("work", ["a long step", "a long prompt"])
def test_health_is_quick_while_the_engine_is_busy(server: Server, client: httpx.Client, oracle: Oracle, work: str):
    oracle.rss_mb = 150  # the allocator keeps pages that held a long text and its tokens
    answered = 0
    if work == "a long step":
        with server.held(client, 2.0) as holder:
            while not any('"type"' in payload for payload in holder.payloads) and answered < 50:
                assert client.get("/health").status_code == client.get("/ping").status_code == 200
                answered += 1
    else:
        text = " ".join(str(i) for i in range(36_000))  # about 200,000 characters of many words
        busy = Stream(client, "/tokenize", {"prompt": text}, stream=False)
        slowest_s = 0.0
        while not busy.began.is_set() or answered < 10:
            began_s = time.monotonic()
            assert client.get("/health").status_code == client.get("/ping").status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            answered += 1
        busy.join()
        assert slowest_s < 10  # 1 s is promised; the rest is for a busy machine
    assert answered >= 10


class MixedLoad:
    """A seeded mix of clients; `unexpected` collects what should not have happened."""

    def __init__(self, server: Server, client: httpx.Client, seed: int) -> None:
        self.server, self.client, self.seed = server, client, seed
        self.unexpected: list[str] = []
        self.done: list[str] = []

    def one(self, number: int) -> None:
        randomness = random.Random(self.seed * 1000 + number)
        kind = randomness.choices(["chat", "completion", "leaves", "bad"], [60, 20, 10, 10])[0]
        words = " ".join(
            randomness.choice(("river", "stone", "light", "wind")) for _ in range(randomness.randrange(60))
        )
        sampling = {"max_tokens": randomness.randrange(1, 80), "temperature": 1.0, "seed": number, "ignore_eos": True}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": words}], **sampling}
        try:
            match kind:
                case "chat":
                    n = randomness.choice((1, 1, 1, 3))
                    self.chat(chat | {"n": n, "stream": True, "stream_options": {"include_usage": True}}, n)
                case "completion":
                    self.completion({"model": MODEL, "prompt": words or "x", "stop": ["zzz"], **sampling})
                case "leaves":
                    connection = self.server.raw_post(
                        "/v1/chat/completions", chat | {"stream": True, "max_tokens": 500}
                    )
                    if randomness.random() < 0.7:
                        connection.recv(1000)
                    connection.close()
                case "bad":
                    check_refused(self.client.post("/v1/chat/completions", json=chat | {"top_p": 7}))
            self.done.append(kind)
        except (AssertionError, httpx.HTTPError, KeyError) as error:
            self.unexpected.append(f"{kind} {number}: {error!r}")

    def chat(self, body: dict[str, Any], n: int) -> None:
        with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            payloads = list(events(reply))
        assert payloads.count("[DONE]") == 1
        assert payloads[-1] == "[DONE]"
        chunks = [json.loads(payload) for payload in payloads[:-1]]
        assert len({chunk["id"] for chunk in chunks}) == 1
        finished = [
            (choice["index"], choice["finish_reason"])
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["finish_reason"] is not None
        ]
        assert sorted(finished) == [(index, "length") for index in range(n)]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == n * body["max_tokens"]

    def completion(self, body: dict[str, Any]) -> None:
        reply = self.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_mix_of_clients_meets_no_fault(server: Server, client: httpx.Client, oracle: Oracle):
    load = MixedLoad(server, client, seed=32)

    each_at_once(load.one, range(280), workers=24)

    assert load.unexpected == []
    assert {kind: load.done.count(kind) > 20 for kind in load.done} == dict.fromkeys(load.done, True)
    assert server.state()["num_aborted"] > 0


def test_clients_that_come_again_and_again_are_all_served(server: Server, client: httpx.Client):
    # Three times what runs and waits at once, all of them at the door again and again.
    def insist(i: int) -> int:
        deadline_s = time.monotonic() + ANSWER_S
        refusals = 0
        while time.monotonic() < deadline_s:
            reply = client.post("/generate", json={"input_ids": [5, 6, i % 300], "sampling_params": greedy(4, n=4)})
            if reply.status_code == 200:
                return refusals
            check_refused(reply, 503)
            refusals += 1
        raise AssertionError("never served")

    with server.held(client, 1.0):
        refusals = each_at_once(insist, range((MAX_RUNNING + MAX_QUEUED) * 3 // 4), workers=60)
    assert sum(refusals) > 0
