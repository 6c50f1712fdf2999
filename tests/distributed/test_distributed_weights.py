"""Weights that several ranks share: replaced in every rank, or in none; and put together from the parts of all."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
sys.path.insert(0, str(Path(__file__).parent.parent / "checkpoint"))

from model_harness import CPU, FAMILIES, MAX_POSITIONS, randomise, save_tiny, tiny_config
from quantised_layers import METHODS
from thread_group import on_ranks

from headrace.attention.torch_native import TorchNativeAttention
from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.quantized_formats import stored_scheme
from headrace.checkpoint.safetensors_file import SafetensorsFile
from headrace.checkpoint.source import open_checkpoint
from headrace.distributed.base import Shard
from headrace.errors import ExecutionError, ModelError
from headrace.execution.load_weights import load_model
from headrace.execution.profiler import StepProfiler
from headrace.execution.rank_jobs import FollowerJobs, LeaderJobs, LeaderWeights, Turn, read_whole, write_parts
from headrace.execution.update_weights import ModelWeights
from headrace.execution.weight_files import open_cache
from headrace.kernels import cpu
from headrace.layers.weight import Placement, Weight
from headrace.messages.ranks import RankStep, RankStop, pack, unpack
from headrace.messages.weights import Prepared, UpdateFromTensors, WorkerOperation
from headrace.models.registry import model_class_for

SIZE = 3
NO_GROUP: Any = None
NO_ADAPTERS: Any = None
LIMIT_S = 60.0


@pytest.fixture
def folders(tmp_path, monkeypatch):
    def make(family: str) -> tuple[Path, Path]:
        for name, seed in (("old", 1), ("new", 2)):
            monkeypatch.setattr(randomise, "__defaults__", (seed,))
            save_tiny(tiny_config(family), tmp_path / name)
        return tmp_path / "old", tmp_path / "new"

    return make


def weights_of(
    folder: Path, shard: Shard, kind: type[ModelWeights] = ModelWeights, whole_experts: bool = False
) -> ModelWeights:
    checkpoint = open_checkpoint(folder)
    spec = model_class_for(checkpoint.config, "auto")
    placement = Placement(CPU, torch.float32, MAX_POSITIONS, shard=shard, whole_experts=whole_experts)
    model = load_model(checkpoint, spec, placement)
    pool: Any = None
    load: Any = None
    return kind(model, TorchNativeAttention(), pool, spec.renaming(checkpoint.config), spec.ignored, load)


def parts_of(weights: ModelWeights) -> list[torch.Tensor]:
    return [weight.read().clone() for weight in weights.model.weights()]


def are_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def missing(leader: ModelWeights, weights: ModelWeights) -> list[Weight]:
    """What the leader has not whole, of another rank."""
    pairs = zip(leader.model.weights(), weights.model.weights(), strict=True)
    return [theirs for ours, theirs in pairs if ours.own_shape != ours.shape]


@pytest.mark.parametrize(
    ("family", "whole_experts"),
    [*((family, False) for family in sorted(FAMILIES)), ("mixtral", True), ("qwen3_moe", True)],
)
def test_each_rank_replaces_its_part_and_all_parts_are_the_whole(family, whole_experts, folders, tmp_path):
    old, new = folders(family)

    def rank_of(folder: Path, rank: int) -> ModelWeights:
        return weights_of(folder, Shard(rank, SIZE, NO_GROUP), whole_experts=whole_experts)

    ranks = [rank_of(old, rank) for rank in range(SIZE)]
    for rank, weights in enumerate(ranks):
        prepared = weights.prepare(UpdateFromTensors(str(new / "model.safetensors")), threading.Event())
        want = parts_of(rank_of(new, rank))
        assert not are_equal(parts_of(weights), want)
        prepared.install()
        assert are_equal(parts_of(weights), want)

    leader, *followers = ranks
    for rank, weights in enumerate(followers):
        write_parts(missing(leader, weights), tmp_path / f"rank-{rank}")
    files = [SafetensorsFile(tmp_path / f"rank-{rank}") for rank in range(len(followers))]
    whole = weights_of(new, Shard())
    for weight, want in zip(leader.model.weights(), whole.model.weights(), strict=True):
        assert torch.equal(read_whole(weight, files), want.read()), weight.name


class CannotPrepare(ModelWeights):
    def prepare(self, operation: WorkerOperation, abandoned: threading.Event, read: Any = None) -> Prepared:
        raise ModelError("it has no room")


def serve(shard: Shard, weights: ModelWeights, act) -> list[torch.Tensor]:
    """`act` on the weights of all ranks, for the leader; followers do what it says. Returns what the rank then has."""
    assert shard.group is not None
    if shard.leads:
        jobs = LeaderJobs(shard.group, Turn())
        act(LeaderWeights(weights, jobs, shard.size))
        shard.group.send(pack(RankStop()))
    else:
        followers_jobs = FollowerJobs(shard.group, NO_ADAPTERS, weights, StepProfiler(None))
        while not isinstance(message := unpack(shard.group.receive()), RankStop):
            assert not isinstance(message, RankStep), message
            followers_jobs.handle(message)
    return parts_of(weights)


def update(folder: Path) -> UpdateFromTensors:
    return UpdateFromTensors(str(folder / "model.safetensors"))


def test_all_ranks_switch_together(folders):
    old, new = folders("llama")

    def act(weights: LeaderWeights) -> None:
        weights.start(update(new)).result().install()

    found = on_ranks(SIZE, lambda shard: serve(shard, weights_of(old, shard), act))

    for rank, parts in enumerate(found):
        assert are_equal(parts, parts_of(weights_of(new, Shard(rank, SIZE, NO_GROUP))))


def test_when_one_rank_cannot_none_changes(folders):
    old, new = folders("llama")

    def act(weights: LeaderWeights) -> None:
        with pytest.raises(ModelError, match="no room"):
            weights.start(update(new)).result()

    def rank(shard: Shard) -> list[torch.Tensor]:
        kind = CannotPrepare if shard.rank == 1 else ModelWeights
        return serve(shard, weights_of(old, shard, kind), act)

    for number, parts in enumerate(on_ranks(SIZE, rank)):
        assert are_equal(parts, parts_of(weights_of(old, Shard(number, SIZE, NO_GROUP))))


def test_what_is_given_up_is_forgotten_by_all(folders):
    """Before it is done and after it; the next update is not in its way."""
    old, new = folders("llama")

    def act(weights: LeaderWeights) -> None:
        early: Any = weights.start(update(new))
        early.abandon()
        early._thread.join(LIMIT_S)
        late = weights.start(update(new))
        late.result()
        late.abandon()
        weights.start(update(new)).result().install()

    jobs: list[FollowerJobs] = []

    def rank(shard: Shard) -> list[torch.Tensor]:
        return serve(shard, weights_of(old, shard), act)

    original = FollowerJobs.__init__

    def remember(self, *args):
        original(self, *args)
        jobs.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FollowerJobs, "__init__", remember)
        found = on_ranks(SIZE, rank)

    assert len(jobs) == SIZE - 1
    assert all(not follower._begun for follower in jobs)
    assert are_equal(found[0], parts_of(weights_of(new, Shard(0, SIZE, NO_GROUP))))


def test_parts_that_cannot_be_written_are_an_error(folders, tmp_path):
    old, _ = folders("llama")
    weights = weights_of(old, Shard(1, SIZE, NO_GROUP))
    with pytest.raises(ExecutionError, match="could not write its part"):
        write_parts(weights.model.weights(), tmp_path / "absent" / "rank-1")


def test_the_tensors_of_a_checkpoint_are_all_there(folders):
    """`own` and `read` agree for every weight."""
    old, _ = folders("llama")
    tensors = load_file(old / "model.safetensors")
    for weight in weights_of(old, Shard(1, SIZE, NO_GROUP)).model.weights():
        assert weight.own_shape == tuple(weight.read().shape)
        assert torch.equal(tensors[weight.name][weight.own], weight.read()), weight.name


@pytest.mark.skipif(bool(cpu.why_not()), reason="packed weights are the native kernels'")
def test_a_rank_reads_and_caches_its_own_experts_only(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    old, _ = folders("mixtral")
    read: list[str] = []
    original = Checkpoint.checked_tensor

    def record(self, name, *args, **kwargs):
        read.append(name)
        return original(self, name, *args, **kwargs)

    def load(rank: int, whole_experts: bool = True) -> tuple[str, list[str], list[torch.Tensor]]:
        """What the cache says, the experts that were read, and what the rank then has."""
        checkpoint = open_checkpoint(old)
        spec = model_class_for(checkpoint.config, "auto")
        shard = Shard(rank, SIZE, NO_GROUP)
        placement = Placement(CPU, torch.float32, MAX_POSITIONS, shard=shard, whole_experts=whole_experts)
        cache = open_cache(checkpoint, spec.name, placement)
        assert cache is not None
        read.clear()
        model = load_model(checkpoint, spec, placement, cache=cache)
        cache.write(model.weights())
        return cache.outcome, [name for name in read if ".experts." in name], [w.read() for w in model.weights()]

    monkeypatch.setattr(Checkpoint, "checked_tensor", record)
    first = [load(rank) for rank in range(SIZE)]
    names = [name for _, experts, _ in first for name in experts]
    assert {outcome for outcome, _, _ in first} == {"no file yet"}
    assert sorted(names) == sorted(name for name in open_checkpoint(old).tensor_names() if ".experts." in name)
    assert load(0, whole_experts=False)[0] == "no file yet"
    for rank, (_, _, parts) in enumerate(first):
        outcome, experts, again = load(rank)
        assert "read in" in outcome
        assert not experts
        assert are_equal(again, parts)


@pytest.mark.parametrize("name", ["gptq-v2", "awq", "ct-4-asymmetric", "ct-int8", "ct-mxfp4", "bnb-nf4"])
def test_experts_that_are_stored_quantised_are_those_of_one_process(name, tmp_path):
    """They are taken as they are stored, so no bit differs, whoever has them."""
    config, method = tiny_config("mixtral"), METHODS[name]
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 64, 96, 1
    save_tiny(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    exact = {}
    for expert in [expert for expert in tensors if ".experts." in expert]:
        layer = method.layer(*tensors.pop(expert).shape, generator)
        exact[expert] = layer.weight.float()
        tensors |= {f"{expert.removesuffix('weight')}{suffix}": part for suffix, part in layer.parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = method.config
    (tmp_path / "config.json").write_text(json.dumps(settings))

    def experts_of(shard: Shard) -> dict[str, torch.Tensor]:
        checkpoint = open_checkpoint(tmp_path)
        spec = model_class_for(checkpoint.config, "auto")
        scheme = stored_scheme(checkpoint.config.quantization)
        placement = Placement(CPU, torch.float32, MAX_POSITIONS, scheme, shard, whole_experts=not shard.is_whole)
        weights = load_model(checkpoint, spec, placement).weights()
        return {
            weight.name: weight.read() for weight in weights if ".experts." in weight.name and not weight.is_elsewhere
        }

    want = experts_of(Shard())
    assert all(torch.allclose(weight, exact[expert], rtol=2**-10, atol=1e-3) for expert, weight in want.items())
    found: dict[str, torch.Tensor] = {}
    for rank in range(2):
        own = experts_of(Shard(rank, 2, NO_GROUP))
        assert 0 < len(own) < len(want)
        assert not own.keys() & found.keys()
        found |= own
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
