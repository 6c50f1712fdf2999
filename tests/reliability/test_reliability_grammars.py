"""Grammars from clients who mean no good: an answer or an error for each, and nobody else is hurt."""

import contextlib
from typing import Any

import httpx
import pytest
from hostile_grammars import HOSTILE
from reliability_harness import Oracle, Server, Stream, check_refused, each_at_once, greedy

GOOD = {"json_schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}}


def answer(client: httpx.Client, params: dict[str, Any]) -> httpx.Response:
    return client.post("/generate", json={"text": "hi", "sampling_params": {"max_new_tokens": 24} | params})


def test_hostile_grammars_end_and_hurt_nobody_beside_them(server: Server, oracle: Oracle, client: httpx.Client):
    # What is compiled is kept, up to a limit; a child process that has grown is replaced.
    oracle.rss_mb = 300
    # Pools that grow when they are needed: 3 threads that compute masks, 2 child processes, the tokenizer's threads. A leak of
    # one for each request would be twice as many.
    oracle.vitals = 8
    streams = [Stream(client, "/generate", {"text": f"n{i}", "sampling_params": greedy(150)}) for i in range(3)]
    replies = each_at_once(lambda params: answer(client, params), HOSTILE.values(), workers=4)
    for name, reply in zip(HOSTILE, replies, strict=True):
        if reply.status_code == 400:
            check_refused(reply)
        elif reply.status_code != 200:
            error = reply.json()["error"]
            assert reply.status_code in (500, 503), (name, reply.text[:300])
            assert "grammar" in error["message"], (name, error)
    statuses = [reply.status_code for reply in replies]
    assert statuses.count(400) >= 4, dict(zip(HOSTILE, statuses, strict=True))
    for stream in streams:
        stream.join()
        assert not stream.has_error
        assert stream.last["meta_info"]["completion_tokens"] == 150
    assert answer(client, GOOD).json()["meta_info"]["finish_reason"]["type"] in ("stop", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_grammar_is_a_400_even_for_a_stream(server: Server, client: httpx.Client, stream: bool):
    body = {"text": "hi", "stream": stream, "sampling_params": {"max_new_tokens": 4, "regex": "(a"}}
    error = check_refused(client.post("/generate", json=body))
    assert error["param"] == "regex"


def test_a_client_that_leaves_while_its_grammar_is_compiled_is_forgotten(server: Server, client: httpx.Client):
    properties = {f"other_{i}": {"type": "integer"} for i in range(5000)}
    slow = {"max_new_tokens": 4, "json_schema": {"type": "object", "properties": properties}}
    with contextlib.suppress(httpx.TimeoutException):
        client.post("/generate", json={"text": "hi", "sampling_params": slow}, timeout=0.05)
    assert answer(client, GOOD).status_code == 200
