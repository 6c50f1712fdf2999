"""Every family on several ranks, layer by layer: the logits of one process."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from model_harness import FAMILIES, open_runner, random_tokens, save_tiny, tiny_config
from thread_group import on_ranks

from headrace.distributed.base import WHOLE, Shard
from headrace.errors import ModelError

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


def test_a_model_that_is_too_small_for_its_ranks_is_refused(folders):
    with pytest.raises(ModelError, match="cannot be split over 7 ranks"):
        on_ranks(7, lambda shard: open_runner(folders("llama"), "torch_native", shard=shard))
