"""Three ways to split at once: two replicas of a model in two stages of two ranks, and what becomes of one replica when a rank of the other dies."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest
from engines import GREEDY, running_engine
from rank_processes import followers
from server_process import ServerProcess, serving

PROMPT = "Once upon a time"
REPLICAS = (0, 1)
LIMIT_S = 240.0
"""Reached only when a test fails."""
# Eight processes import torch, which takes minutes on two cores that do other work as well.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tiny_model: str) -> Iterator[ServerProcess]:
    parts = ("--dp-size", "2", "--tp-size", "2", "--pp-size", "2", "--rank-timeout-s", "60")
    with serving(tiny_model, *parts, "--dtype", "float32", "--max-total-tokens", "2048") as made:
        yield made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S) as made:
        yield made


def asked(client: openai.OpenAI, replica: int, num_tokens: int) -> dict[str, Any]:
    """Arguments of a completion by this replica."""
    more = {"ignore_eos": True, "routed_dp_rank": replica}
    model = client.models.list().data[0].id
    return {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": num_tokens, "extra_body": more}


def replicas_of(server: ServerProcess) -> dict[psutil.Process, set[psutil.Process]]:
    """The processes of followers by that of their scheduler."""
    found: dict[psutil.Process, set[psutil.Process]] = {}
    for follower in followers(server.pid):
        scheduler = follower.parent()
        if scheduler is not None:  # it has not ended meanwhile
            found.setdefault(scheduler, set()).add(follower)
    return found


def complete(server: ServerProcess) -> dict[psutil.Process, set[psutil.Process]]:
    """`replicas_of`, once both have all of their ranks; every look asks the server."""
    end_s = time.monotonic() + LIMIT_S
    found = replicas_of(server)
    while [len(others) for others in found.values()] != [3, 3]:
        assert time.monotonic() < end_s, found
        server.get("/v1/models")
        found = replicas_of(server)
    return found


def test_eight_ranks_give_the_text_of_one_process(tiny_model: str, server: ServerProcess, client: openai.OpenAI):
    with running_engine(tiny_model, dtype="float32") as engine:
        want = engine.generate(PROMPT, GREEDY)["text"]
    for replica in REPLICAS:
        reply = client.completions.create(**asked(client, replica, GREEDY["max_new_tokens"]))
        assert reply.choices[0].text == want
    assert len(complete(server)) == len(REPLICAS)


def test_a_rank_that_is_killed_costs_no_token_and_the_other_replica_nothing(
    server: ServerProcess, client: openai.OpenAI
):
    num_tokens = 150
    whole = [client.completions.create(**asked(client, replica, num_tokens)).choices[0].text for replica in REPLICAS]
    before = complete(server)
    begun = [threading.Event() for _ in REPLICAS]
    texts = ["" for _ in REPLICAS]

    def read(replica: int) -> None:
        for part in client.completions.create(stream=True, **asked(client, replica, num_tokens)):
            texts[replica] += part.choices[0].text
            begun[replica].set()

    readers = [threading.Thread(target=read, args=(replica,)) for replica in REPLICAS]
    for reader in readers:
        reader.start()
    assert all(event.wait(LIMIT_S) for event in begun)
    lost, other = before
    before[lost].pop().kill()
    psutil.wait_procs([lost], LIMIT_S)
    for reader in readers:
        reader.join(LIMIT_S)

    assert texts == whole
    after = complete(server)
    assert lost not in after
    assert after[other] == before[other]
