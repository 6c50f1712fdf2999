"""Adapters on several ranks: each has its part of the factors, and all have an adapter or none."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from lora_harness import ATTENTION, DENSE, tiny_adapter
from model_harness import CPU, MAX_POSITIONS, Runner, open_runner, random_tokens, save_tiny, tiny_config
from thread_group import on_ranks

from headrace.distributed.base import WHOLE, Shard
from headrace.errors import ModelError
from headrace.execution.lora import LoraPool, StagedAdapter
from headrace.execution.profiler import StepProfiler
from headrace.execution.rank_jobs import FollowerJobs, LeaderAdapters, LeaderJobs, Turn
from headrace.layers.weight import Placement
from headrace.messages.ranks import RankStep, RankStop, pack, unpack

NO_WEIGHTS: Any = None
# Float32 sums in another order.
TOLERANCE = 2e-4
CASES = {
    "all dense layers": ("llama", DENSE, 2),
    "three ranks, two KV heads": ("llama", DENSE, 3),
    "biases, one KV head": ("llama-biases", ("q_proj", "v_proj", "down_proj"), 2),
    "sandwich norms": ("gemma3", DENSE, 2),
    "beside experts": ("qwen3_moe", ATTENTION, 2),
}


def pool_of(runner: Runner, shard: Shard, max_loras: int = 4, kind: type[LoraPool] = LoraPool) -> LoraPool:
    return kind(runner.model, Placement(CPU, torch.float32, MAX_POSITIONS, shard=shard), max_loras, 64)


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_one_process(tmp_path: Path, name: str):
    family, targets, size = CASES[name]
    model = save_tiny(tiny_config(family), tmp_path / "model")
    adapter = tiny_adapter(model, targets, rank=5).save(tmp_path / "adapter")
    first, second = random_tokens(40, 1), random_tokens(23, 2)

    def logits(shard: Shard) -> torch.Tensor:
        runner = open_runner(tmp_path / "model", "torch_native", shard=shard)
        pool = pool_of(runner, shard)
        pool.load(1, adapter)
        pool.step.rows = pool.rows([1, 0], [0, 40, 63])
        return torch.cat(runner.step([(0, 0, first), (1, 0, second)]))

    whole = logits(WHOLE)
    leader, *_ = on_ranks(size, logits)
    base = torch.cat(open_runner(tmp_path / "model", "torch_native").step([(0, 0, first)]))

    assert (leader - whole).abs().max() < TOLERANCE
    assert (leader[:40] - base).abs().max() > 100 * TOLERANCE  # the adapter has an effect


class OtherFiles(LoraPool):
    """Reads adapters from files that another process has just replaced."""

    def stage(self, lora_id: int, path: str, fingerprint: str = "") -> StagedAdapter:
        return replace(super().stage(lora_id, path, fingerprint), fingerprint="other")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, str]:
    """Of a model and of an adapter for it."""
    model = save_tiny(tiny_config("llama"), tmp_path / "model")
    return tmp_path / "model", tiny_adapter(model).save(tmp_path / "adapter")


def serve(shard: Shard, pool: LoraPool, act) -> list[int]:
    """`act` on the adapters of all ranks, for the leader; followers do what it says. Returns the ids of the adapters that the rank has."""
    assert shard.group is not None
    if shard.leads:
        act(LeaderAdapters(pool, LeaderJobs(shard.group, Turn())))
        shard.group.send(pack(RankStop()))
    else:
        jobs = FollowerJobs(shard.group, pool, NO_WEIGHTS, StepProfiler(None))
        while not isinstance(message := unpack(shard.group.receive()), RankStop):
            assert not isinstance(message, RankStep), message
            jobs.handle(message)
    return [lora_id for lora_id in range(10) if lora_id in pool]


def test_adapters_come_and_go_on_all_ranks(folders):
    folder, adapter = folders

    def act(adapters: LeaderAdapters) -> None:
        fingerprint = adapters.load(1, adapter)
        assert adapters.load(2, adapter, fingerprint) == fingerprint
        adapters.unload(1)
        assert 1 not in adapters
        assert 2 in adapters
        with pytest.raises(ModelError, match="have changed"):
            adapters.load(3, adapter, "another")
        with pytest.raises(ModelError, match="not a folder"):
            adapters.load(4, str(folder / "absent"))
        adapters.load(5, adapter)

    def rank(shard: Shard) -> list[int]:
        return serve(shard, pool_of(open_runner(folder, "torch_native", shard=shard), shard), act)

    assert on_ranks(3, rank) == [[2, 5]] * 3


def test_when_one_rank_cannot_load_an_adapter_none_has_it(folders):
    """The second rank has room for one only."""
    folder, adapter = folders

    def act(adapters: LeaderAdapters) -> None:
        adapters.load(1, adapter)
        with pytest.raises(ModelError, match="no room"):
            adapters.load(2, adapter)
        assert 2 not in adapters
        adapters.unload(1)
        adapters.load(3, adapter)

    def rank(shard: Shard) -> list[int]:
        runner = open_runner(folder, "torch_native", shard=shard)
        return serve(shard, pool_of(runner, shard, 1 if shard.rank == 1 else 4), act)

    assert on_ranks(3, rank) == [[3]] * 3


def test_when_one_rank_reads_other_files_none_has_the_adapter(folders):
    folder, adapter = folders

    def act(adapters: LeaderAdapters) -> None:
        with pytest.raises(ModelError, match="changed while they were read"):
            adapters.load(1, adapter)

    def rank(shard: Shard) -> list[int]:
        runner = open_runner(folder, "torch_native", shard=shard)
        return serve(shard, pool_of(runner, shard, kind=OtherFiles if shard.rank == 1 else LoraPool), act)

    assert on_ranks(2, rank) == [[], []]
