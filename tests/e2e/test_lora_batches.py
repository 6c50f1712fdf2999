"""Adapters through a whole engine: greedy answers of the merged model, mixed batches, caches, pressure, quantised bases."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import GREEDY, SEEDED, random_ids, running_engine
from lora_harness import TinyAdapter, tiny_adapter

from headrace.api.engine import Engine
from headrace.checkpoint.weight_formats import names_on_cpu
from headrace.errors import CapacityError, ConfigError, ModelError, NotFoundError, RequestError

PROMPT = random_ids(20, seed=5)


@pytest.fixture(scope="module")
def adapters(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, TinyAdapter]]:
    """Three adapters for the tiny model, saved."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    made = {
        "x": tiny_adapter(model, seed=1),
        "y": tiny_adapter(model, ("q_proj", "v_proj", "down_proj"), rank=8, seed=2),
        "z": tiny_adapter(model, rank=2, seed=3),
    }
    return {name: (adapter.save(tmp_path_factory.mktemp(name)), adapter) for name, adapter in made.items()}


@pytest.fixture(scope="module")
def engine(tiny_model: str, adapters) -> Iterator[Engine]:
    """With two of the adapters from the start, one of them of a name with a slash."""
    paths = f"x={adapters['x'][0]}, org/y={adapters['y'][0]}"
    with running_engine(tiny_model, dtype="float32", lora_paths=paths, max_loras=2) as engine:
        yield engine


def ids_of(engine: Engine, prompt: list[int], lora: str | None, sampling: dict[str, Any] = GREEDY) -> list[int]:
    output = engine.generate(input_ids=prompt, sampling_params=sampling, lora_path=lora)
    return output["output_ids"]


def test_greedy_tokens_are_those_of_the_merged_model(engine: Engine, tiny_model: str, adapters):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for name, merged in {
        None: model,
        "x": adapters["x"][1].merged(model),
        "org/y": adapters["y"][1].merged(model),
    }.items():
        want = merged.generate(
            torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert ids_of(engine, PROMPT, name) == want[0, len(PROMPT) :].tolist(), name


@pytest.mark.parametrize(
    "options",
    [
        {"activations": "float32"},
        {"activations": "bfloat16"},
        {"dtype": "float32", "chunked_prefill_size": 7},
        {"disable_overlap_schedule": True, "disable_radix_cache": True},
        {"max_total_tokens": 256, "schedule_conservativeness": 0.01},
        *({"quantization": name} for name in names_on_cpu()),
        {"disable_native_kernels": True},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_a_mixed_batch_gives_what_each_gives_alone(tiny_model: str, adapters, options: dict[str, Any]):
    prompts = [random_ids(length, seed=length) for length in (3, 30, 30, 17, 41, 20)]
    names = ["x", None, "y", "x", None, "y"]
    num_tokens = 40 if "max_total_tokens" in options else 12
    sampling = [(GREEDY if i % 2 else SEEDED) | {"max_new_tokens": num_tokens} for i in range(len(prompts))]
    with running_engine(tiny_model, max_running_requests=8, **options) as engine:
        base = [ids_of(engine, prompt, None, params) for prompt, params in zip(prompts, sampling, strict=True)]
        for name in ("x", "y"):
            engine.load_lora_adapter(name, adapters[name][0])
        alone = [
            ids_of(engine, prompt, name, params) for prompt, name, params in zip(prompts, names, sampling, strict=True)
        ]
        mixed = engine.generate(input_ids=prompts, sampling_params=sampling, lora_path=names)
        retracted = engine.internal_state().num_retracted
    assert [output["output_ids"] for output in mixed] == alone
    assert [ids for ids, name in zip(alone, names, strict=True) if name is None] == [base[1], base[4]]
    assert alone[0] != base[0]
    if options.get("max_total_tokens"):
        assert retracted > 0  # it really happened


def test_an_adapter_never_reads_the_kv_of_another_or_of_its_former_self(tiny_model: str, adapters):
    prompt = random_ids(100, seed=8)

    def cached(lora: str | None) -> int:
        output = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1}, lora_path=lora)
        return output["meta_info"]["cached_tokens"]

    with running_engine(tiny_model) as engine:
        engine.load_lora_adapter("x", adapters["x"][0])
        engine.load_lora_adapter("y", adapters["y"][0])
        assert [cached(lora) for lora in (None, "x", "y")] == [0, 0, 0]
        assert all(cached(lora) > 0 for lora in (None, "x", "y"))
        engine.unload_lora_adapter("x")
        engine.load_lora_adapter("x", adapters["z"][0])
        assert cached("x") == 0
        assert cached("y") > 0


def test_one_more_adapter_than_fits_takes_the_place_of_the_one_not_used_longest(tiny_model: str, adapters):
    with running_engine(tiny_model, dtype="float32", max_loras=2) as engine:
        engine.load_lora_adapter("x", adapters["x"][0])
        engine.load_lora_adapter("y", adapters["y"][0], pinned=True)
        want = ids_of(engine, PROMPT, "x")
        engine.load_lora_adapter("z", adapters["z"][0])
        assert engine.lora_adapters() == ["x", "y", "z"]
        assert ids_of(engine, PROMPT, "x") == want  # read again, in the place of z
        with pytest.raises(RequestError, match="3 adapters in one request"):
            engine.generate(input_ids=[PROMPT] * 3, sampling_params=GREEDY, lora_path=["x", "y", "z"])
        engine.load_lora_adapter("w", adapters["z"][0], pinned=True)
        with pytest.raises(CapacityError, match="in use or pinned"):
            ids_of(engine, PROMPT, "x")
        assert len(ids_of(engine, PROMPT, "y")) == GREEDY["max_new_tokens"]


@pytest.mark.parametrize("is_of_the_start", [False, True], ids=["loaded", "from the start"])
def test_an_adapter_is_never_another_under_its_name(tiny_model: str, adapters, tmp_path: Path, is_of_the_start: bool):
    folder = tmp_path / "x"
    shutil.copytree(adapters["x"][0], folder)
    options = {"lora_paths": f"x={folder}"} if is_of_the_start else {}
    with running_engine(tiny_model, dtype="float32", max_loras=1, **options) as engine:
        if not is_of_the_start:
            engine.load_lora_adapter("x", str(folder))
        for file in Path(adapters["z"][0]).iterdir():
            shutil.copy(file, folder)
        engine.load_lora_adapter("y", adapters["y"][0])  # in the place of x
        with pytest.raises(RequestError, match="unload it and load it again"):
            ids_of(engine, PROMPT, "x")
        engine.unload_lora_adapter("x")
        engine.load_lora_adapter("x", str(folder))
        assert len(ids_of(engine, PROMPT, "x")) == GREEDY["max_new_tokens"]


def test_adapters_come_and_go_a_hundred_times_while_requests_run(engine: Engine, adapters):
    want = ids_of(engine, PROMPT, "x")
    long = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
    stream = engine.generate(input_ids=PROMPT, sampling_params=long, stream=True, lora_path="x")
    next(stream)
    for _ in range(100):
        engine.load_lora_adapter("guest", adapters["z"][0])
        engine.unload_lora_adapter("guest")
    *_, last = stream
    assert last["output_ids"][:16] == want
    assert engine.lora_adapters() == ["x", "org/y"]
    pool = engine.internal_state().pool
    assert pool.consistent
    assert pool.request_slots_free == pool.request_slots_total
    assert ids_of(engine, PROMPT, "org/y") != want


def test_wrong_names_and_files_are_refused_and_the_engine_goes_on(engine: Engine, adapters, tmp_path: Path):
    with pytest.raises(NotFoundError, match="no adapter 'nope'"):
        ids_of(engine, PROMPT, "nope")
    with pytest.raises(RequestError, match="already loaded"):
        engine.load_lora_adapter("x", adapters["x"][0])
    with pytest.raises(RequestError, match="not a folder"):
        engine.load_lora_adapter("new", str(tmp_path / "absent"))
    with pytest.raises(NotFoundError):
        engine.unload_lora_adapter("new")
    assert engine.lora_adapters() == ["x", "org/y"]
    assert ids_of(engine, PROMPT, "x")


@pytest.mark.parametrize("value", ["x", "x=", "=p", "x=p,x=q", "a=p,b=q,c=r"])
def test_adapters_of_the_command_line_are_checked_at_start(tiny_model: str, value: str):
    with pytest.raises(ConfigError, match="lora-paths"), running_engine(tiny_model, lora_paths=value, max_loras=2):
        pass


def test_an_adapter_that_does_not_load_is_a_reason_not_to_start(tiny_model: str, tmp_path: Path):
    with pytest.raises(ModelError, match=r"adapter 'x'.*not a folder"):
        running_engine(tiny_model, lora_paths=f"x={tmp_path / 'absent'}").__enter__()
