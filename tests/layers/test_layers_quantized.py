"""Quantised layers: what is quantised, how well, and what stays exact."""

import pytest
import torch

from headrace import kernels
from headrace.checkpoint.model_config import MoeConfig
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import FORMATS
from headrace.kernels.cpu import why_not
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear
from headrace.layers.mlp import SparseMoe
from headrace.layers.quantization import gptq, integer_format
from headrace.layers.weight import Placement

CPU = torch.device("cpu")
# Step of the grid over the spread of normal weights, by format, and a margin: 254 and 15 steps over about four deviations.
ERRORS = {name: facts.error for name, facts in FORMATS.items() if facts.codes is not None}


def placement(scheme, dtype=torch.bfloat16):
    return Placement(CPU, dtype, 32, scheme)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True, params=["native", "torch"])
def _both_implementations(request):
    if request.param == "native" and why_not():
        pytest.skip(why_not())
    with kernels.prefer(request.param):
        yield


@pytest.mark.parametrize("scheme", list(ERRORS))
def test_rounding_loses_no_more_than_the_scheme_says(scheme):
    weight = normal(48, 200)
    weight[3] = 0.0
    got = integer_format(scheme).quantize(weight).dequantize()
    assert (got - weight).norm() / weight.norm() < ERRORS[scheme]
    assert torch.equal(got[3], weight[3])


@pytest.mark.parametrize("scheme", list(ERRORS))
def test_a_quantised_linear_is_close_to_the_float_one_and_reads_back(scheme):
    parts = {"q_proj": normal(40, 96), "k_proj": normal(9, 96, seed=1)}
    biases = {name: normal(part.shape[0], seed=2) for name, part in parts.items()}
    layer = Linear(96, {name: len(part) for name, part in parts.items()}, placement(scheme), bias=True)
    weights = {weight.name: weight for weight in layer.weights("")}
    for name, part in parts.items():
        weights[f"{name}.weight"].load(part)
        weights[f"{name}.bias"].load(biases[name])
    x = normal(5, 96, seed=3)

    y = layer(x)

    want = x @ torch.cat(list(parts.values())).T + torch.cat(list(biases.values()))
    assert (y - want).norm() / want.norm() < 1.5 * ERRORS[scheme]
    for name, part in parts.items():
        got = weights[f"{name}.weight"].read().float()
        assert (got - part).norm() / part.norm() < ERRORS[scheme] + 0.003
        assert weights[f"{name}.weight"].itemsize == FORMATS[scheme].itemsize(2)


def test_stored_matrices_are_used_as_they_are():
    matrix = integer_format("int4").quantize(normal(32, 64))
    layer = Linear(64, {"a": 32}, placement("int4", torch.float32))
    (weight,) = layer.weights("")
    assert weight.load_quantized is not None
    weight.load_quantized(matrix)
    # Minimums round to 11 bits, a fraction of a step.
    assert ((weight.read() - matrix.dequantize()).abs() <= 2.0**-11 * matrix.minimums.abs().max() * 2).all()


def test_a_float_layer_takes_no_stored_matrix():
    (weight,) = Linear(64, {"a": 32}, placement("none")).weights("")
    assert weight.load_quantized is None


def test_parts_of_different_schemes_meet_in_eight_bits():
    first, second, plain = normal(8, 64), normal(8, 64, seed=1), normal(8, 64, seed=2)
    four, eight = integer_format("int4").quantize(first), integer_format("int8").quantize(second)
    whole = integer_format("int4").join([four, eight, plain])
    assert whole.scheme == "int8"
    want = torch.cat([four.dequantize(), eight.dequantize(), integer_format("int4").quantize(plain).dequantize()])
    assert (whole.dequantize() - want).norm() / want.norm() < ERRORS["int8"]
    assert torch.equal(whole.codes[8:16], eight.codes)


def test_int8_rotates_what_it_rounds_and_nothing_that_is_stored():
    int8, plain = integer_format("int8"), normal(8, 64)
    stored = int8.quantize(normal(8, 64, seed=1))

    rounded = int8.join([plain, plain])
    assert rounded.scheme == "int8-rotated"
    # A part that is replaced meets the other as it is kept, and is rounded as it was.
    assert torch.equal(int8.join([rounded.rows(0, 8), plain]).codes, rounded.codes)

    mixed = int8.join([stored, plain])
    assert mixed.scheme == "int8"
    assert torch.equal(mixed.codes[:8], stored.codes)
    assert (mixed.dequantize()[8:] - plain).norm() / plain.norm() < ERRORS["int8"]


def test_the_table_of_a_tied_embedding_is_not_quantised():
    table = normal(50, 64)
    head = Linear(64, {"lm_head": 50}, placement("int4").head)
    layer = Embedding(50, 64, placement("int4"), tied=head)
    (weight,) = layer.weights("embed")
    weight.load(table)
    assert torch.equal(layer(torch.arange(50)), table.bfloat16().float())
    x = normal(3, 64, seed=1)
    assert (head(x) - x @ table.T).norm() / (x @ table.T).norm() < 1.5 * ERRORS["int8"]
    stored = integer_format("int8").quantize(table)
    assert weight.load_quantized is not None
    weight.load_quantized(stored)
    assert torch.equal(layer(torch.arange(50)), stored.dequantize().bfloat16().float())


def test_routers_stay_float():
    moe = MoeConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True)
    layer = SparseMoe(64, moe, "silu", placement("int4", torch.float32))
    weights = {weight.name: weight for weight in layer.weights("mlp")}
    router = normal(4, 64)
    weights["mlp.gate.weight"].load(router)
    assert torch.equal(weights["mlp.gate.weight"].read(), router)
    assert weights["mlp.gate.weight"].load_quantized is None
    assert weights["mlp.experts.0.down_proj.weight"].load_quantized is not None


@pytest.mark.parametrize("scheme", list(ERRORS))
def test_quantised_experts_are_close_to_the_float_ones(scheme):
    moe = MoeConfig(num_experts=6, num_experts_per_tok=2, intermediate_size=64, norm_topk_prob=True)
    exact = SparseMoe(96, moe, "silu", placement("none", torch.float32))
    rounded = SparseMoe(96, moe, "silu", placement(scheme))
    for seed, (weight, other) in enumerate(zip(exact.weights("mlp"), rounded.weights("mlp"), strict=True)):
        # A router of integers is the same in bfloat16.
        given = normal(*weight.shape, seed=seed) / 8 if "experts" in weight.name else normal(*weight.shape).round()
        weight.load(given)
        other.load(given)
    x = normal(20, 96, seed=99)
    want = exact(x)
    assert (rounded(x) - want).norm() / want.norm() < 2.5 * ERRORS[scheme]


def test_error_feedback_beats_rounding_on_correlated_inputs():
    mixing = normal(16, 128)
    x = normal(600, 16, seed=1) @ mixing + 0.1 * normal(600, 128, seed=2)
    weight = normal(40, 128, seed=3)

    fed_back, nearest = gptq.quantize(weight, x.T @ x), integer_format("int4").quantize(weight)

    def error(matrix: QuantizedMatrix) -> float:
        return float((x @ (matrix.dequantize() - weight).T).norm())

    assert error(fed_back) < 0.6 * error(nearest)


def test_error_feedback_survives_inputs_that_were_never_seen():
    matrix = gptq.quantize(normal(8, 64), torch.zeros(64, 64))
    assert (matrix.dequantize() - normal(8, 64)).norm() / normal(8, 64).norm() < ERRORS["int4"]
