"""Every family on several ranks, layer by layer: the logits of one process."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from model_harness import CPU, FAMILIES, open_runner, random_tokens, save_tiny, tiny_config
from thread_group import on_ranks

from headrace.checkpoint.model_config import MoeConfig
from headrace.checkpoint.weight_formats import names_on_cpu
from headrace.distributed.base import WHOLE, Shard
from headrace.errors import ModelError
from headrace.layers.mlp import SparseMoe
from headrace.layers.quantization import integer_format
from headrace.layers.weight import Placement

TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_tiny(tiny_config(family), made[family])
        return made[family]

    return folder


def logits_of(folder, shard: Shard, **options):
    """Of two sequences in chunks; of a follower its part."""
    runner = open_runner(folder, "torch_native", shard=shard, **options)
    first, second = random_tokens(40, 1), random_tokens(23, 2)
    out = [runner.chunks(0, first, [7, 16])]
    out += runner.step([(0, 40, [5]), (1, 0, second)])
    return torch.cat(out)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("size", [2, 3])
def test_the_logits_are_those_of_one_process(folders, family, size):
    folder = folders(family)
    whole = logits_of(folder, WHOLE)

    leader, *followers = on_ranks(size, lambda shard: logits_of(folder, shard))

    assert leader.shape == whole.shape
    assert (leader - whole).abs().max() < TOLERANCE
    assert all(0 < part.shape[1] < whole.shape[1] for part in followers)


@pytest.mark.parametrize("quantization", ["int8", "int16", "int4"])
def test_quantised_weights_are_cut_between_groups(tmp_path, quantization):
    config = tiny_config("llama")
    config.hidden_size, config.intermediate_size, config.head_dim = 384, 320, 64
    save_tiny(config, tmp_path)
    whole = logits_of(tmp_path, WHOLE, quantization=quantization)

    leader, _ = on_ranks(2, lambda shard: logits_of(tmp_path, shard, quantization=quantization))

    # Groups of 32 are the same; only where rows are rotated in larger blocks do values differ.
    assert (leader - whole).abs().max() < 0.05 * whole.abs().max()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("size", [2, 3])
def test_whole_experts_on_different_ranks_give_the_logits_of_one_process(folders, family, size):
    """Of 4 or 5 experts, so that some ranks have more than others."""
    folder = folders(family)
    whole = logits_of(folder, WHOLE)

    leader, *_ = on_ranks(size, lambda shard: logits_of(folder, shard, whole_experts=True))

    assert (leader - whole).abs().max() < TOLERANCE


@pytest.mark.parametrize("stored", [False, True], ids=["quantised while loading", "as stored"])
@pytest.mark.parametrize("scheme", ["none", *names_on_cpu()])
def test_whole_experts_of_every_weight_format_add_up_to_those_of_one_process(scheme, stored):
    """Each expert's product has the same bits, so only the order of the sum differs."""
    moe = MoeConfig(num_experts=7, num_experts_per_tok=3, intermediate_size=160)
    x = torch.randn(30, 128, generator=torch.Generator().manual_seed(3))

    def output_of(shard: Shard) -> torch.Tensor:
        placement = Placement(CPU, torch.bfloat16, 8, scheme, shard, whole_experts=not shard.is_whole)
        layer = SparseMoe(128, moe, "silu", placement)
        generator = torch.Generator().manual_seed(4)
        for weight in layer.weights("moe"):
            tensor = torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5
            if stored and weight.load_quantized is not None:
                weight.load_quantized(integer_format(scheme).quantize(tensor))
            else:
                weight.load(tensor)
        return layer(x)

    whole = output_of(WHOLE)
    for part in on_ranks(3, output_of):
        assert (part - whole).abs().max() < 1e-5 * whole.abs().max()


def test_experts_that_are_chosen_are_counted_once_and_by_every_rank(folders):
    def counts_of(shard: Shard) -> dict[int, list[int]]:
        runner = open_runner(folders("mixtral"), "torch_native", shard=shard, whole_experts=not shard.is_whole)
        for counts in runner.model.expert_counts().values():
            counts.start(CPU)
        runner.chunks(0, random_tokens(40, 1), [7, 16])
        return {layer: counts.take() for layer, counts in runner.model.expert_counts().items()}

    want = counts_of(WHOLE)
    assert all(sum(layer) == 2 * 40 for layer in want.values())
    assert on_ranks(2, counts_of) == [want, want]


def test_a_model_that_is_too_small_for_its_ranks_is_refused(folders):
    with pytest.raises(ModelError, match="cannot be split over 7 ranks"):
        on_ranks(7, lambda shard: open_runner(folders("llama"), "torch_native", shard=shard))
