"""Adapters on two ranks, through whole engines: the answers of one process, loading while serving, and a rank that is lost."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import GREEDY, random_ids, running_engine
from lora_harness import tiny_adapter
from rank_processes import follower_of

from headrace.api.engine import Engine
from headrace.errors import NotFoundError, RequestError

TWO: dict[str, Any] = {"tp_size": 2, "single_process": False, "dtype": "float32"}
PROMPTS = [random_ids(length, seed=length) for length in (20, 3, 30)]
LONG = {"temperature": 0.0, "max_new_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of two adapters for the tiny model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    made = {"x": tiny_adapter(model, seed=1), "y": tiny_adapter(model, ("q_proj", "down_proj"), rank=8, seed=2)}
    return {name: adapter.save(tmp_path_factory.mktemp(name)) for name, adapter in made.items()}


@pytest.fixture(scope="module")
def ranks(tiny_model: str, adapters: dict[str, str]) -> Iterator[Engine]:
    """With one of the adapters from the start."""
    with running_engine(tiny_model, lora_paths=f"x={adapters['x']}", max_loras=2, **TWO) as engine:
        yield engine


def answers(engine: Engine, names: list[str | None]) -> list[dict[str, Any]]:
    return engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, lora_path=names, return_logprob=True)


def test_text_and_logprobs_are_those_of_one_process(tiny_model: str, adapters: dict[str, str], ranks: Engine):
    names = ["x", None, "y"]
    ranks.load_lora_adapter("y", adapters["y"])
    with running_engine(tiny_model, dtype="float32", lora_paths=f"x={adapters['x']},y={adapters['y']}") as one:
        want = answers(one, names)
        base = answers(one, [None, None, None])
    found = answers(ranks, names)
    ranks.unload_lora_adapter("y")

    for a, b in zip(want, found, strict=True):
        assert a["output_ids"] == b["output_ids"]
        for p, q in zip(a["meta_info"]["output_token_logprobs"], b["meta_info"]["output_token_logprobs"], strict=True):
            assert p[0] is None or abs(p[0] - q[0]) < 1e-3  # float32 sums in another order
    assert want[0]["output_ids"] != base[0]["output_ids"]
    assert answers(ranks, [None, None, None])[1]["output_ids"] == base[1]["output_ids"]


def test_adapters_come_and_go_while_requests_run(adapters: dict[str, str], ranks: Engine):
    want = ranks.generate(input_ids=PROMPTS[0], sampling_params=LONG, lora_path="x")["output_ids"]
    stream = ranks.generate(input_ids=PROMPTS[0], sampling_params=LONG, stream=True, lora_path="x")
    next(stream)
    for _ in range(2):
        ranks.load_lora_adapter("guest", adapters["y"])
        assert ranks.generate(input_ids=PROMPTS[1], sampling_params=GREEDY, lora_path="guest")["output_ids"]
        ranks.unload_lora_adapter("guest")
    *_, last = stream
    assert last["output_ids"] == want
    assert ranks.lora_adapters() == ["x"]


def test_what_cannot_be_read_changes_nothing(ranks: Engine, tmp_path: Path):
    with pytest.raises(RequestError, match="not a folder"):
        ranks.load_lora_adapter("new", str(tmp_path / "absent"))
    with pytest.raises(NotFoundError):
        ranks.unload_lora_adapter("new")
    assert ranks.lora_adapters() == ["x"]
    assert ranks.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, lora_path="x")["output_ids"]


def test_after_a_rank_was_lost_adapters_are_there_again(adapters: dict[str, str], ranks: Engine):
    ranks.load_lora_adapter("y", adapters["y"])
    whole = [ranks.generate(input_ids=PROMPTS[0], sampling_params=LONG, lora_path=name)["output_ids"] for name in "xy"]
    streams = [ranks.generate(input_ids=PROMPTS[0], sampling_params=LONG, stream=True, lora_path=name) for name in "xy"]
    for stream in streams:
        next(stream)
    os.kill(follower_of(ranks).pid, signal.SIGKILL)
    assert [list(stream)[-1]["output_ids"] for stream in streams] == whole
    assert ranks.lora_adapters() == ["x", "y"]
    ranks.unload_lora_adapter("y")
