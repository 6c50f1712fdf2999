"""Adapters of two replicas: loaded in both, there again when one has died, and no request notices."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import transformers
from reliability_harness import START_S, Server, Stream, greedy, wait_until

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from lora_harness import tiny_adapter

NUM_TOKENS = 120
NAMES = ("start", "late", None)


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of three adapters."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("adapters")
    return {name: tiny_adapter(model, seed=i).save(folder / name) for i, name in enumerate(("start", "gone", "late"))}


@pytest.fixture(scope="module")
def replicas(tiny_model: Path, adapters: dict[str, str]) -> Iterator[Server]:
    paths = f"start={adapters['start']},gone={adapters['gone']}"
    with Server(tiny_model, ("--dp-size", "2", "--max-loras", "2", "--lora-paths", paths)) as server:
        yield server.wait_started()
        assert server.stop() == 0


def body_of(name: str | None, replica: int) -> dict[str, Any]:
    return {"text": "Verse: ", "lora_path": name, "routed_dp_rank": replica, "sampling_params": greedy(NUM_TOKENS)}


def answers(client: httpx.Client, replica: int) -> list[str]:
    replies = [client.post("/generate", json=body_of(name, replica)) for name in NAMES]
    assert [reply.status_code for reply in replies] == [200] * len(NAMES), [reply.text for reply in replies]
    return [reply.json()["text"] for reply in replies]


def test_a_dead_replica_comes_back_with_the_adapters_of_now(replicas: Server, adapters: dict[str, str]):
    with replicas.client() as client:
        for path, body in (
            ("/unload_lora_adapter", {"lora_name": "gone"}),
            ("/load_lora_adapter", {"lora_name": "late", "lora_path": adapters["late"]}),
        ):
            reply = replicas.admin.post(path, json=body)
            assert reply.status_code == 200, reply.text
        want = answers(client, 0)
        assert answers(client, 1) == want
        assert len(set(want)) == len(NAMES)

        replicas.inject("forward", "sleep", "holds", at_token=60, seconds=300.0)
        streams = [Stream(client, "/generate", body_of(name, 0)) for name in NAMES if name != "late"]
        assert all(stream.began.wait(START_S) for stream in streams)
        # The last to come, for nobody is served behind it.
        streams.insert(1, Stream(client, "/generate", body_of("late", 0) | {"rid": "holds"}))
        wait_until(lambda: num_tokens(streams[1]) > 50, "it stands still", START_S)
        min(schedulers(replicas), key=lambda child: child.pid).kill()
        for stream in streams:
            stream.join(START_S)

        assert [stream.last["text"] for stream in streams] == want
        assert answers(client, 0) == want
        assert answers(client, 1) == want
        assert client.post("/generate", json=body_of("gone", 0)).status_code == 404


def num_tokens(stream: Stream) -> int:
    """How many have come so far. Chunks may carry several."""
    return stream.last["meta_info"]["completion_tokens"] if stream.payloads else 0


def schedulers(server: Server) -> list[psutil.Process]:
    return [child for child in server.process.children() if "scheduler" in child.cmdline()]
