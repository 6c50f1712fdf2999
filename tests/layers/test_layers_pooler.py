"""Pooling: which tokens of a text count, and that nothing else does."""

from itertools import pairwise

import pytest
import torch

from headrace.checkpoint.pooling import PoolingConfig, PoolingKind
from headrace.layers.pooler import HeadLinear, Pooler
from headrace.layers.weight import Placement

PLACEMENT = Placement(torch.device("cpu"), torch.float32, 64)
STARTS = [0, 1, 8, 10, 47]


def hidden(size: int = 19) -> torch.Tensor:
    return torch.randn(STARTS[-1], size, generator=torch.Generator().manual_seed(0))


def pooler(pooling: PoolingKind, *, normalize: bool = False) -> Pooler:
    return Pooler(PoolingConfig(task="embed", pooling=pooling, dimensions=19, normalize=normalize), 19, PLACEMENT)


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_each_row_is_made_of_its_own_tokens(pooling: PoolingKind):
    texts = hidden().split([b - a for a, b in pairwise(STARTS)])
    want = [{"cls": text[0], "mean": text.mean(0), "last": text[-1]}[pooling] for text in texts]

    assert torch.equal(pooler(pooling)(hidden(), STARTS), torch.stack(want))


def test_of_the_last_token_nothing_else_need_be_there():
    ends = [start - 1 for start in STARTS[1:]]

    assert torch.equal(pooler("last")(hidden()[ends], [0, 1, 2, 3, 4]), pooler("last")(hidden(), STARTS))


def test_vectors_have_length_one_if_the_config_says_so_and_zeros_stay_zeros():
    states = hidden()
    states[0] = 0

    vectors = pooler("mean", normalize=True)(states, STARTS)

    torch.testing.assert_close(vectors.norm(dim=1), torch.tensor([0.0, 1.0, 1.0, 1.0]))


def test_no_rows_give_no_vectors():
    assert pooler("mean")(hidden()[:0], [0]).shape == (0, 19)


@pytest.mark.parametrize("activation", ["identity", "tanh", "relu", "gelu", "silu"])
def test_a_row_of_a_head_has_the_same_bits_alone_and_in_a_batch(activation):
    layer = HeadLinear("dense", 19, 19, PLACEMENT, activation=activation)
    for seed, weight in enumerate(layer.weights("")):
        weight.load(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))

    batch = layer(hidden())

    assert all(torch.equal(layer(row[None])[0], batch[index]) for index, row in enumerate(hidden()))
