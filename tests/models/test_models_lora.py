"""Adapters change a model as peft's merge does, row by row, and a file that does not fit changes nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_harness import ATTENTION, DENSE, TinyAdapter, tiny_adapter
from model_harness import BACKENDS, CPU, MAX_POSITIONS, Runner, open_runner, random_tokens, save_tiny, tiny_config
from safetensors.torch import load_file, save_file

from headrace import kernels
from headrace.checkpoint.lora import parse_lora_config
from headrace.checkpoint.source import open_checkpoint
from headrace.errors import ModelError
from headrace.execution.lora import LoraPool
from headrace.layers.weight import Placement
from headrace.models.registry import model_class_for

# Float32 sums in another order than the merged product's, as for the models themselves.
TOLERANCE = 2e-4

CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "all dense layers": ("llama", DENSE, {}),
    "two of a stack, biases": ("llama-biases", ("q_proj", "v_proj"), {"rank": 1}),
    "ranks and alphas by pattern": (
        "qwen3",
        DENSE,
        {"ranks": {"v_proj": 7, "down_proj": 2}, "alphas": {"v_proj": 3.5}},
    ),
    "rank stabilised": ("qwen2", ("o_proj", "up_proj"), {"rslora": True, "rank": 16}),
    "sandwich norms": ("gemma3", DENSE, {}),
    "beside experts": ("qwen3_moe", ATTENTION, {}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> tuple[Path, Any, TinyAdapter, str]:
    """A model's folder, the transformers model, an adapter and its folder."""
    family, targets, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny(tiny_config(family), folder)
    adapter = tiny_adapter(model, targets, **options)
    return folder, model, adapter, adapter.save(tmp_path_factory.mktemp("adapter"))


def make_pool(runner: Runner, folder: Path, impl: Any = "auto", **limits: int) -> LoraPool:
    config = open_checkpoint(folder).config
    spec = model_class_for(config, impl)
    options = {"max_loras": 4, "max_rank": 64} | limits
    placement = Placement(CPU, torch.float32, MAX_POSITIONS)
    return LoraPool(runner.model, placement, rename=spec.renaming(config), **options)


def logits(
    runner: Runner, pool: LoraPool, rows: list[tuple[int, int, list[int]]], ids: list[int]
) -> list[torch.Tensor]:
    """As Runner.step, with the adapter of each row."""
    starts = [sum(len(tokens) for _, _, tokens in rows[:i]) for i in range(len(rows) + 1)]
    pool.step.rows = pool.rows(ids, starts)
    return runner.step(rows)


def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module")
def peft_logits() -> Iterator[Callable[..., torch.Tensor]]:
    """What peft says, in a process of its own: where transformers finds peft it imports it, which doubles its start."""
    peft = Path(sys.prefix) / "peft"
    assert peft.is_dir(), "scripts/setup --dev puts it there"
    program = [sys.executable, Path(__file__).parent / "peft_logits.py"]
    environment = os.environ | {"PYTHONPATH": str(peft)}
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(model: Path, adapter: str, tokens: list[int], to: Path) -> torch.Tensor:
            asked = {"model": str(model), "adapter": adapter, "tokens": tokens, "to": str(to)}
            print(json.dumps(asked), file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"
            return load_file(to)["logits"]

        yield ask
        process.stdin.close()


def test_logits_are_those_of_peft(case, peft_logits, tmp_path: Path):
    folder, model, _, path = case
    runner = open_runner(folder, "torch_native")
    pool = make_pool(runner, folder)
    pool.load(1, path)
    tokens = random_tokens(24, seed=4)
    want = peft_logits(folder, path, tokens, tmp_path / "logits.safetensors")

    (got,) = logits(runner, pool, [(0, 0, tokens)], [1])

    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)
    assert (want - reference(model, tokens)).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_those_of_the_merged_model(case, backend: str):
    folder, model, adapter, path = case
    runner = open_runner(folder, backend)
    pool = make_pool(runner, folder)
    pool.load(1, path)
    tokens = random_tokens(40, seed=3)
    want, plain = reference(adapter.merged(model), tokens), reference(model, tokens)
    assert (want - plain).abs().max() > 100 * TOLERANCE

    (got,) = logits(runner, pool, [(0, 0, tokens)], [1])
    (base,) = logits(runner, pool, [(1, 0, tokens)], [0])

    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(base, plain, atol=TOLERANCE, rtol=TOLERANCE)


def test_transformers_models_take_adapters_too(tmp_path: Path):
    model = save_tiny(tiny_config("llama"), tmp_path / "model")
    adapter = tiny_adapter(model)
    runner = open_runner(tmp_path / "model", "torch_native", impl="transformers")
    pool = make_pool(runner, tmp_path / "model", "transformers")
    pool.load(1, adapter.save(tmp_path / "adapter"))
    tokens = random_tokens(20, seed=3)

    (got,) = logits(runner, pool, [(0, 0, tokens)], [1])

    torch.testing.assert_close(got, reference(adapter.merged(model), tokens), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Runner, LoraPool, Any, Path]:
    """A llama with a pool of its own, and a folder for adapters."""
    model = save_tiny(tiny_config("llama"), tmp_path / "model")
    runner = open_runner(tmp_path / "model", BACKENDS[-1])
    return runner, make_pool(runner, tmp_path / "model", max_loras=3, max_rank=8), model, tmp_path


@pytest.mark.parametrize("implementation", ["native", "torch"])
def test_a_row_has_the_same_bits_alone_and_in_a_mixed_batch(tmp_path: Path, implementation: str):
    with kernels.prefer(implementation):
        model = save_tiny(tiny_config("llama"), tmp_path / "model")
        runner = open_runner(tmp_path / "model", BACKENDS[-1])
        pool = make_pool(runner, tmp_path / "model")
        pool.load(1, tiny_adapter(model, seed=1).save(tmp_path / "one"))
        pool.load(2, tiny_adapter(model, ("q_proj", "down_proj"), rank=3, seed=2).save(tmp_path / "two"))
        prompts = [random_tokens(length, seed=length) for length in (9, 1, 17, 5)]
        ids = [1, 0, 2, 1]
        alone = [logits(runner, pool, [(i, 0, prompt)], [ids[i]])[0] for i, prompt in enumerate(prompts)]

        mixed = logits(runner, pool, [(i, 0, prompt) for i, prompt in enumerate(prompts)], ids)
        chunks = [logits(runner, pool, [(0, 0, prompts[0][:4]), (1, 0, prompts[1])], [1, 0])[0]]
        chunks += logits(runner, pool, [(3, 0, prompts[3]), (0, 4, prompts[0][4:])], [1, 1])[1:]

        for got, want in zip(mixed, alone, strict=True):
            assert torch.equal(got, want)
        assert torch.equal(torch.cat(chunks), alone[0])
        pool.step.rows = None
        assert torch.equal(runner.step([(1, 0, prompts[1])])[0], alone[1])  # base rows: as if there were no adapters


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "DoRA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "biases": ({"bias": "all"}, "bias"),
    "bias of B": ({"lora_bias": True}, "lora_bias"),
    "another method": ({"peft_type": "IA3"}, "peft_type"),
    "another task": ({"task_type": "SEQ_CLS"}, "task_type"),
    "changed base": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    "replicated layers": ({"layer_replication": [[0, 1]]}, "layer_replication"),
    "expert parameters": ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
    "no rank": ({"r": 0}, "r must be"),
    "rank of another kind": ({"r": True}, "r must be"),
    "alpha of another kind": ({"lora_alpha": "x"}, "lora_alpha"),
    "no pattern": ({"rank_pattern": {"(": 4}}, "regular expression"),
    "a pattern that looks ahead": ({"target_modules": r"(?!.*visual).*_proj"}, "target_modules holds .* RE2 syntax"),
    "a pattern that closes another bracket": ({"rank_pattern": {"a)|(b": 4}}, "RE2 syntax"),
    "too many patterns": ({"alpha_pattern": {f"q{i}": 1.0 for i in range(1025)}}, "1025 patterns, at most 1024"),
    "rank too big": ({"r": 9, "rank_pattern": {}}, "rank 9"),
    "rank that the tensors have not": ({"r": 5}, "the model and the rank require"),
    "fewer targets than tensors": ({"target_modules": ["q_proj"]}, "do not belong to a supported linear layer"),
    "more targets than tensors": ({"exclude_modules": "nothing", "target_modules": [*DENSE, "lm_head"]}, "lm_head"),
    "limited to one layer": ({"layers_to_transform": [0]}, "do not belong to a supported linear layer"),
    "targets that are not there": ({"target_modules": ["c_attn"]}, "matches no linear layer"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_served_is_refused_by_name_and_changes_nothing(small, name: str):
    runner, pool, model, folder = small
    changes, message = CHANGES[name]
    pool.load(1, tiny_adapter(model, seed=1).save(folder / "good"))
    (before,) = logits(runner, pool, [(0, 0, [5, 6, 7])], [1])

    with pytest.raises(ModelError, match=message):
        pool.load(2, tiny_adapter(model, seed=2).save(folder / "bad", **changes))

    assert 2 not in pool
    assert torch.equal(logits(runner, pool, [(0, 0, [5, 6, 7])], [1])[0], before)


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_a_pattern_that_would_backtrack_for_ever_is_answered_at_once(key: str):
    raw = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], key: r"(?:(?:\w|\.)*)*!"}
    config = parse_lora_config(raw | {"rank_pattern": {r"(a|aa|\w)+!": 2}})
    module = "model.layers.0.self_attn." + "a" * 200 + ".q_proj"

    assert config.wants(module) == (key == "exclude_modules")
    assert config.rank_of(module) == 4


def _first(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in tensors if name.endswith("down_proj.lora_B.weight"))


def _without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[_first(tensors)]


def _with_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_first(tensors)][0, 0] = torch.nan


def _wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_first(tensors)] = tensors[_first(tensors)][:-1].contiguous()


def _integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_first(tensors)] = tensors[_first(tensors)].to(torch.int32)


def _extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"] = torch.ones(4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without, "missing"),
        (_with_nan, "NaN"),
        (_wrong_shape, "require"),
        (_integers, "I32"),
        (_extra, "not part of a LoRA"),
    ],
)
def test_damaged_tensors_are_refused(small, damage, message: str):
    _, pool, model, folder = small
    path = Path(tiny_adapter(model).save(folder / "bad"))
    tensors = load_file(path / "adapter_model.safetensors")
    damage(tensors)
    save_file(tensors, path / "adapter_model.safetensors")

    with pytest.raises(ModelError, match=message) as caught:
        pool.load(1, str(path))
    assert str(folder) not in caught.value.message
    assert len(pool) == 0


def test_files_that_are_cut_off_pickled_or_absent_are_refused(small):
    _, pool, model, folder = small
    path = Path(tiny_adapter(model).save(folder / "bad"))
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ModelError, match="truncated"):
        pool.load(1, str(path))
    weights.rename(path / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickled weights are not read"):
        pool.load(1, str(path))
    (path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="JSON"):
        pool.load(1, str(path))
    with pytest.raises(ModelError, match="not a folder"):
        pool.load(1, str(folder / "absent"))
    assert len(pool) == 0


def test_all_linear_names_every_linear_layer_but_the_head(small):
    runner, pool, model, folder = small
    adapter = tiny_adapter(model)
    pool.load(1, adapter.save(folder / "all", target_modules="all-linear"))
    pool.load(2, adapter.save(folder / "pattern", target_modules=r".*\.(self_attn|mlp)\.[a-z]+_proj"))
    rows = [(0, 0, [5, 6, 7])]
    assert torch.equal(logits(runner, pool, rows, [1])[0], logits(runner, pool, rows, [2])[0])


def test_a_hundred_loads_and_unloads_leave_nothing_behind(small):
    runner, pool, model, folder = small
    path = tiny_adapter(model).save(folder / "a")
    pool.load(1, path)
    (before,) = logits(runner, pool, [(0, 0, [5, 6, 7])], [1])
    for number in range(2, 102):
        pool.load(number, path)
        pool.unload(number)
    pool.unload(7)  # not there: nothing
    assert len(pool) == 1
    layers = {id(w.layer.adapters): w.layer.adapters for w in runner.model.weights() if w.layer is not None}
    assert {tuple(adapters.by_id) for adapters in layers.values() if adapters is not None} == {(1,)}
    assert torch.equal(logits(runner, pool, [(0, 0, [5, 6, 7])], [1])[0], before)


def test_a_full_pool_refuses_and_the_config_is_read_as_peft_writes_it(small):
    _, pool, model, folder = small
    written = tiny_adapter(model).save(
        folder / "a", eva_config=None, loftq_config={}, modules_to_save=None, revision=None
    )
    assert json.loads((Path(written) / "adapter_config.json").read_text())["loftq_config"] == {}
    for number in (1, 2, 3):
        pool.load(number, written)
    with pytest.raises(ModelError, match="max-loras"):
        pool.load(4, written)


def test_an_adapter_that_was_given_up_while_it_was_read_does_not_stay(small, monkeypatch):
    """The load that hung comes back after the front end had it unloaded."""
    _, pool, model, folder = small
    path = tiny_adapter(model, seed=3).save(folder / "adapter")
    read = LoraPool._read

    def slow(pool: LoraPool, checkpoint: Any) -> Any:
        pool.unload(1)
        return read(pool, checkpoint)

    with monkeypatch.context() as patched:
        patched.setattr(LoraPool, "_read", slow)
        with pytest.raises(ModelError, match="unloaded while it was read"):
            pool.load(1, path)
    assert len(pool) == 0
    pool.load(2, path)
    assert 2 in pool
