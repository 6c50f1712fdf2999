"""Adapters while the weights under them change or are gone for a while."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from lora_harness import TinyAdapter, tiny_adapter
from weights_harness import GREEDY, PROMPTS, engine_of, tensors_of

from headrace.api.engine import Engine


@pytest.fixture(scope="module")
def adapter(old: str) -> TinyAdapter:
    model = transformers.AutoModelForCausalLM.from_pretrained(old, dtype=torch.float32)
    return tiny_adapter(model, seed=1)


@pytest.fixture
def engine(old: str, adapter: TinyAdapter, tmp_path: Path) -> Iterator[Engine]:
    with engine_of(old) as engine:
        engine.load_lora_adapter("x", adapter.save(tmp_path / "x"))
        yield engine


def answers(engine: Engine, lora: str | None) -> list[list[int]]:
    outputs = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, lora_path=lora)
    return [output["output_ids"] for output in outputs]


def merged_answers(folder: str, adapter: TinyAdapter) -> list[list[int]]:
    """Of transformers, with the adapter added to the checkpoint's weights."""
    model = adapter.merged(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("way", ["disk", "tensors"])
def test_an_update_goes_under_the_adapters(engine: Engine, old: str, new: str, adapter: TinyAdapter, way: str):
    assert answers(engine, "x") == merged_answers(old, adapter)
    base = answers(engine, None)
    if way == "disk":
        assert engine.update_weights_from_disk(new)[0]
    else:
        assert engine.update_weights_from_tensor(tensors_of(new).items())[0]
    assert answers(engine, "x") == merged_answers(new, adapter)
    assert answers(engine, None) != base
    assert engine.lora_adapters() == ["x"]


def test_adapters_are_there_when_released_memory_is_back(engine: Engine, adapter: TinyAdapter, tmp_path: Path):
    want = [answers(engine, lora) for lora in ("x", None)]
    assert engine.release_memory_occupation()[0]
    engine.load_lora_adapter("late", adapter.save(tmp_path / "late"))
    engine.unload_lora_adapter("x")
    engine.load_lora_adapter("x", str(tmp_path / "x"))
    assert engine.resume_memory_occupation()[0]
    assert [answers(engine, lora) for lora in ("x", None)] == want
    assert answers(engine, "late") == want[0]


def test_adapters_come_while_generation_is_paused(engine: Engine, adapter: TinyAdapter, tmp_path: Path):
    want = answers(engine, "x")
    assert engine.pause_generation("in_place")[0]
    engine.load_lora_adapter("late", adapter.save(tmp_path / "late"))
    assert engine.continue_generation()[0]
    assert answers(engine, "late") == want
