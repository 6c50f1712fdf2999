"""GGUF files whose blocks of 256 two ranks would share: ranks, stages, adapters, updates and a lost scheduler, against one process."""

import os
import signal
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from lora_harness import tiny_adapter
from test_models_gguf_types import FEED_FORWARD, HIDDEN, MATRICES, PROMPT, VOCAB, save_gguf

from headrace import Engine
from headrace.kernels import cpu

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
TYPES = ("Q6_K", "Q4_K", "Q5_K", "Q6_K", "Q6_K", "Q3_K", "Q2_K", "Q5_0")
"""Of the embedding, q, k, v, what attention gives (half of whose rows is half a block), gate, up and down."""
OTHER_TYPES = ("Q5_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q5_0", "Q4_K", "Q3_K")
ROUNDED = 0.1
"""Mean difference of logprobs where a matrix of 6 bits multiplies bytes, and where it is bfloat16."""
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_total_tokens": 512,
    "kv_cache_dtype": "bfloat16",
    "log_level": "error",
    "num_threads": 2,
    "max_loras": 1,
}
LONG = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
SPLIT: dict[str, dict[str, int]] = {"ranks": {"tp_size": 2}, "stages": {"pp_size": 2}}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two models of one shape in different types, with a row of the vocabulary for each of two ranks."""
    monkeypatch.setitem(MATRICES, "token_embd", (2 * VOCAB, HIDDEN))
    for name, types, seed in (("one", TYPES, 4), ("other", OTHER_TYPES, 5)):
        kinds = [gguf.GGMLQuantizationType[kind] for kind in types]
        save_gguf(tmp_path / f"{name}.gguf", *kinds, num_layers=2, seed=seed)
    return str(tmp_path / "one.gguf"), str(tmp_path / "other.gguf")


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    config = transformers.Qwen2Config(
        vocab_size=2 * VOCAB, hidden_size=HIDDEN, intermediate_size=FEED_FORWARD, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return tiny_adapter(transformers.Qwen2ForCausalLM(config)).save(tmp_path / "adapter")


def logprobs(engine: Engine, lora: str | None = None) -> list[float]:
    """Of the prompt's tokens."""
    answer = engine.generate(
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        lora_path=lora,
    )
    return [one[0] for one in answer["meta_info"]["input_token_logprobs"][1:]]


def story(engine: Engine, files: tuple[str, str], adapter: str) -> dict[str, list[float]]:
    """What the model says at first, with an adapter, and after each kind of update."""
    told = {"file": logprobs(engine)}
    engine.load_lora_adapter("x", adapter)
    told["adapter"] = logprobs(engine, "x")
    engine.unload_lora_adapter("x")
    for number in (1, 2):  # the product that has it becomes one of floats, and stays one
        new = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(number)) / 16
        assert engine.update_weights_from_tensor([(Q_PROJ, new)])[0]
        told[f"tensor {number}"] = logprobs(engine)
    assert engine.update_weights_from_disk(files[1])[0]
    told["other file"] = logprobs(engine)
    assert engine.update_weights_from_disk(files[0])[0]
    assert logprobs(engine) == told["file"]
    return told


def distance(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


@pytest.mark.parametrize("split", SPLIT)
def test_a_split_model_says_what_one_process_says_also_after_updates_and_when_its_scheduler_was_killed(
    split: str, files: tuple[str, str], adapter: str
):
    with Engine(model_path=files[0], single_process=True, **OPTIONS) as engine:
        want = story(engine, files, adapter)
    for one, two in zip(list(want.values()), list(want.values())[1:], strict=False):
        assert distance(one, two) > 2 * ROUNDED

    with Engine(model_path=files[0], **OPTIONS, **SPLIT[split]) as engine:
        # Half of what attention gives is half a block of Q6_K, in both layers.
        cut = {kind["type"]: kind["num_straddled"] for kind in engine.get_server_info()["stored_types"]}
        assert cut == dict.fromkeys((*TYPES, "F32"), 0) | {"Q6_K": 2 if split == "ranks" else 0}
        found = story(engine, files, adapter)
        for name, told in want.items():
            # A stage computes whole layers, with the same bits.
            assert distance(found[name], told) <= (ROUNDED if split == "ranks" else 0.0), name
        assert engine.update_weights_from_disk(files[1])[0]
        whole = engine.generate(input_ids=PROMPT, sampling_params=LONG)["output_ids"]
        [leader] = [one["pid"] for one in engine.get_ranks() if one["rank"] == 0]
        stream = engine.generate(input_ids=PROMPT, sampling_params=LONG, stream=True)
        ids = next(stream)["output_ids"]
        assert len(ids) < len(whole)
        os.kill(leader, signal.SIGKILL)
        for output in stream:
            ids = output["output_ids"]
        assert ids == whole
        assert logprobs(engine) == found["other file"]
