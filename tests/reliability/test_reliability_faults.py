"""Faults inside the engine: the request that has one ends alone, the others give what they give alone."""

import json
from pathlib import Path

import httpx
import pytest
from reliability_harness import Oracle, Server, each_at_once, greedy, wait_until

PROMPTS = [f"Request number {i} begins like this" for i in range(8)]
VICTIM = 3


def run_together(server: Server, client: httpx.Client, prompts: list[str], tokens: int, name: str) -> list[httpx.Response]:
    """All prompts at once, greedy, rid `name-i`."""

    def send(i: int) -> httpx.Response:
        body = {"text": prompts[i], "rid": f"{name}-{i}", "sampling_params": greedy(tokens)}
        return client.post("/generate", json=body)

    return each_at_once(send, range(len(prompts)))


@pytest.mark.parametrize(
    "stage, kind, at_token, tracebacks",
    [
        ("admission", "raise", 0, 1),
        ("sampling", "raise", 0, 0),
        ("sampling", "raise", 5, 0),
        ("sampling", "nan", 0, 0),
        ("sampling", "nan", 5, 0),
        ("detokenize", "raise", 1, 1),
        ("detokenize", "raise", 5, 1),
    ],
)
def test_a_fault_of_one_request_is_that_one_500(
    server: Server, client: httpx.Client, oracle: Oracle, stage: str, kind: str, at_token: int, tracebacks: int
):
    oracle.expected_tracebacks = tracebacks  # logged once, at the boundary
    alone = [server.generate(client, prompt, 24) for prompt in PROMPTS]
    server.inject(stage, kind, f"{stage}-{VICTIM}", at_token)

    replies = run_together(server, client, PROMPTS, 24, stage)

    assert replies[VICTIM].status_code == 500 or at_token > 0, replies[VICTIM].text
    for i, reply in enumerate(replies):
        if i != VICTIM:
            assert reply.status_code == 200, reply.text
            assert reply.json()["text"] == alone[i]["text"]
            assert reply.json()["output_ids"] == alone[i]["output_ids"]
    if at_token:
        print(replies[VICTIM].status_code, replies[VICTIM].text)
