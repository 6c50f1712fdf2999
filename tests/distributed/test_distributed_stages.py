"""Layers in stages: the bits of one process, on every family; and what a stage loads."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from model_harness import FAMILIES, open_runner, random_tokens, save_tiny, tiny_config
from thread_group import on_stages

from headrace.distributed.base import ALL_LAYERS, Stage
from headrace.errors import ModelError
from headrace.kernels.cpu import why_not

BACKENDS = ["torch_native", *([] if why_not() else ["cpu"])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_tiny(tiny_config(family), made[family])
        return made[family]

    return folder


def logits_of(folder, backend, stage=ALL_LAYERS, **options):
    """Of two sequences in chunks, all positions and then the last ones only."""
    runner = open_runner(folder, backend, stage=stage, **options)
    runner.model.fuse(runner.attention)
    first, second = random_tokens(40, 1), random_tokens(23, 2)
    out = [*runner.step([(0, 0, first[:7])]), *runner.step([(0, 7, first[7:]), (1, 0, second[:20])])]
    with torch.inference_mode():
        hidden = runner.hidden([(0, 40, [5]), (1, 20, second[20:])], [1, 0])
        runner.hidden([(1, 23, [4, 9])], [0])
    return torch.cat([*out, runner.model.logits(hidden)]) if stage.is_first else None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stages_give_the_bits_of_one_process(folders, family, backend):
    folder = folders(family)
    whole = logits_of(folder, backend)

    for count in (2, 3):
        leader, *_ = on_stages(count, lambda stage: logits_of(folder, backend, stage))
        assert torch.equal(leader, whole)


def test_every_stage_has_a_layer():
    with pytest.raises(ModelError, match="2 layers cannot be split over 3 stages"):
        Stage(0, 3).split(2, 1.0)
