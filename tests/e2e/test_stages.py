"""A model whose layers are in stages, through whole engines: the bits of one process, and several steps in flight."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from engines import (
    FILTERED,
    GREEDY,
    PENALISED,
    SEEDED,
    Answer,
    make_cases,
    one_by_one,
    running_engine,
    together,
)
from lora_harness import tiny_adapter

from headrace.api.engine import Engine
from headrace.errors import ConfigError

FLOAT32 = {"dtype": "float32"}
TWO: dict[str, Any] = {"pp_size": 2, "single_process": False, **FLOAT32}
CASES = make_cases([1, 17, 130], {"greedy": GREEDY, "seeded": SEEDED, "filtered": FILTERED, "penalised": PENALISED})


@pytest.fixture(scope="module")
def adapter(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return str(tiny_adapter(model, seed=1).save(tmp_path_factory.mktemp("adapter")))


@pytest.fixture(scope="module")
def stages(tiny_model: str, adapter: str) -> Iterator[Engine]:
    with running_engine(tiny_model, lora_paths=f"x={adapter}", **TWO) as engine:
        yield engine


@pytest.fixture(scope="module")
def want(tiny_model: str, adapter: str) -> Iterator[dict[str, Any]]:
    """What one process answers."""
    with running_engine(tiny_model, lora_paths=f"x={adapter}", **FLOAT32) as engine:
        yield {"cases": one_by_one(engine, CASES), "others": others(engine)}


def others(engine: Engine) -> list[Any]:
    """Hidden states, the answers of rows with and without an adapter, and what embeddings as a prompt give."""
    ids = list(range(5, 40))
    hidden = engine.generate(input_ids=ids, sampling_params=GREEDY, return_hidden_states=True)
    mixed = engine.generate(input_ids=[ids, ids], sampling_params=GREEDY, lora_path=["x", None], return_logprob=True)
    return [
        hidden["meta_info"]["hidden_states"],
        [(one["output_ids"], one["meta_info"]["output_token_logprobs"]) for one in mixed],
        engine.generate(input_embeds=[[0.01 * i] * 64 for i in range(9)], sampling_params=GREEDY)["output_ids"],
    ]


def test_answers_have_the_bits_of_one_process(stages: Engine, want: dict[str, Any]):
    assert one_by_one(stages, CASES) == want["cases"]
    assert others(stages) == want["others"]


def test_steps_in_flight_and_chunks_change_nothing(tiny_model: str, stages: Engine, want: dict[str, Any]):
    alone: dict[str, Answer] = want["cases"]
    assert together(stages, CASES) == alone
    with running_engine(tiny_model, chunked_prefill_size=16, disable_overlap_schedule=True, **TWO) as engine:
        assert together(engine, CASES) == alone


def test_what_stages_cannot_do_is_refused(tiny_model: str):
    with pytest.raises(ConfigError, match="--pp-size needs processes"):
        Engine(model_path=tiny_model, pp_size=2, single_process=True)
    with pytest.raises(ConfigError, match="at most 64"):
        Engine(model_path=tiny_model, pp_size=16, tp_size=8)
