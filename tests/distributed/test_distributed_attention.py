"""Attention of each rank's own rows, layer by layer: the logits of one process, whoever has which rows."""

import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from model_harness import BACKENDS, Runner, open_runner, random_tokens, save_tiny, tiny_config
from thread_group import on_ranks

from headrace.distributed.base import Shard

TOLERANCE = 2e-4
FAMILIES = ["mixtral", "qwen3_moe"]
FIRST, SECOND, THIRD, FOURTH = (random_tokens(70, seed) for seed in range(4))
# Rows of the ranks in turn. In the second step the middle one of three ranks has none.
STEPS = [
    [[(0, 0, FIRST[:9]), (1, 0, SECOND[:20])], [(2, 0, THIRD[:1])], [(3, 0, FOURTH[:5])]],
    [[(0, 9, FIRST[9:60]), (1, 20, SECOND[20:21])], [], [(3, 5, FOURTH[5:7])]],
    [[(1, 21, SECOND[21:40])], [(2, 1, THIRD[1:2])], []],
]
NUM_READ = {"all": None, "the last of each row": 1, "none": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in made.items():
        save_tiny(tiny_config(family), folder)
    return made


def hidden_of(runner: Runner, num_read: int | None, size: int, rank: int | None) -> torch.Tensor:
    """Hidden states of all steps. rank: None = of a model that computes every row."""
    out = []
    for parts in STEPS:
        # Two ranks: the first has what the first two of three have.
        parts = parts if size == 3 else [parts[0] + parts[1], parts[2]]
        rows = [row for part in parts for row in part]
        wanted = None if num_read is None else [num_read] * len(rows)
        ends = list(accumulate((len(part) for part in parts), initial=0))
        own = None if rank is None else range(ends[rank], ends[rank + 1])
        out.append(runner.hidden(rows, wanted, own))
    return torch.cat(out)


@pytest.mark.parametrize("whole_experts", [False, True], ids=["parts of experts", "whole experts"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_hidden_states_are_those_of_one_process(folders, family, size, whole_experts):
    for backend in BACKENDS:
        runner = open_runner(folders[family], backend)
        want = {name: hidden_of(runner, num_read, size, None) for name, num_read in NUM_READ.items()}

        def found(shard: Shard, backend: str = backend) -> dict[str, torch.Tensor]:
            own = open_runner(folders[family], backend, shard=shard, whole_experts=whole_experts, whole_attention=True)
            return {name: hidden_of(own, num_read, size, shard.rank) for name, num_read in NUM_READ.items()}

        for states in on_ranks(size, found):
            for name in NUM_READ:
                assert states[name].shape == want[name].shape
                assert torch.allclose(states[name], want[name], rtol=0, atol=TOLERANCE)


def test_the_first_layers_attention_has_the_bits_of_one_process(folders):
    """Nothing is summed before it but the embedding, of which a token is in one rank only."""
    runner = open_runner(folders["qwen3_moe"], "torch_native")
    hidden_of(runner, None, 2, None)
    want = [cache.clone() for cache in (runner.pool.k[0], runner.pool.v[0])]

    def caches(shard: Shard) -> list[torch.Tensor]:
        own = open_runner(folders["qwen3_moe"], "torch_native", shard=shard, whole_attention=True)
        hidden_of(own, None, 2, shard.rank)
        return [own.pool.k[0], own.pool.v[0]]

    found = on_ranks(2, caches)
    for index, whole in enumerate(want):
        parts = [part[index] for part in found]
        assert all(part.any() for part in parts)
        assert torch.equal(parts[0] + parts[1], whole)  # where one has something, the other has zeros


def test_every_rank_has_all_attention_weights_and_a_part_of_the_others(folders):
    folder = folders["mixtral"]
    whole = {weight.name: weight for weight in open_runner(folder, "torch_native").model.weights()}

    def shapes(shard: Shard) -> dict[str, tuple[int, ...]]:
        model = open_runner(folder, "torch_native", shard=shard, whole_attention=True).model
        return {weight.name: weight.own_shape for weight in model.weights()}

    for found in on_ranks(2, shapes):
        for name, shape in found.items():
            is_split = "experts" in name or name in ("lm_head.weight", "model.embed_tokens.weight")
            assert (shape != whole[name].shape) == is_split, name
