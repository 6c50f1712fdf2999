"""The contract of a weight format, over every format: a new one is covered as soon as it has its facts and its class.

Whole engines over every format that a CPU serves: tests/weights/test_weights_equality.py (updates from disk and from tensors),
test_weights_saved.py (export), tests/execution/test_execution_weight_cache.py, tests/e2e/test_lora_batches.py.
"""

from typing import get_args

import numpy as np
import pytest
import torch

from headrace import kernels
from headrace.checkpoint.gguf import BLOCK_TYPES
from headrace.checkpoint.model_config import MoeConfig
from headrace.checkpoint.quantized_matrix import BlockMatrix, QuantizedMatrix
from headrace.checkpoint.weight_formats import FINEST_STORED, FORMATS, STORED, Scheme, help_text
from headrace.kernels.cpu import why_not
from headrace.kernels.packing import LoraFactors, LoraPart, LoraRows
from headrace.layers.linear import Linear, LinearAdapters, LoraStep
from headrace.layers.mlp import SparseMoe
from headrace.layers.quantization import IntegerFormat, integer_format, weight_format
from headrace.layers.weight import Placement

NAMES = list(FORMATS)
SIZES = {"q_proj": 64, "k_proj": 32}
IN_SIZE = 96

every_format = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(params=["native", "torch"])
def implementation(request):
    if request.param == "native" and why_not():
        pytest.skip(why_not())
    with kernels.prefer(request.param):
        yield request.param


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights and biases of `linear`."""
    weights = {f"{name}.weight": normal(size, IN_SIZE, seed=seed + size) for name, size in SIZES.items()}
    return weights | {f"{name}.bias": normal(size, seed=seed + size + 1) for name, size in SIZES.items()}


def linear(name: Scheme, loaded: dict[str, torch.Tensor]) -> Linear:
    """A layer of two projections with biases, in float32 where it stays float."""
    layer = Linear(IN_SIZE, SIZES, Placement(torch.device("cpu"), torch.float32, 32, name), bias=True)
    for weight in layer.weights(""):
        weight.load(loaded[weight.name])
    return layer


def product(x: torch.Tensor, loaded: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a float layer gives."""
    return torch.cat([x @ loaded[f"{name}.weight"].T + loaded[f"{name}.bias"] for name in SIZES], dim=1)


def tolerance(name: Scheme) -> float:
    """Of an output, relative: weights and activations are rounded; floats are summed in another order."""
    return 1.5 * FORMATS[name].error + 1e-5


def test_every_name_has_its_facts_and_its_class():
    assert set(get_args(Scheme)) == set(FORMATS)
    assert [weight_format(name).name for name in NAMES] == NAMES
    for name, facts in FORMATS.items():
        assert isinstance(weight_format(name), IntegerFormat) == (facts.codes is not None), name


@every_format
def test_the_facts_of_a_format_fit_one_another(name):
    facts = FORMATS[name]
    assert facts.on_cpu or facts.gpu is not None, "somebody serves it"
    assert facts.quantizes == (facts.error > 0)
    assert (facts.codes is None) == (facts.activations is None)
    assert name in help_text() or not facts.quantizes or facts.option != "--quantization"
    assert facts.option != "" or any(other.rounds_to == name for other in FORMATS.values()), "somebody rounds to it"
    for taken in facts.takes:
        assert FORMATS[taken].codes is not None
        assert FORMATS[taken].error <= facts.error, "as fine as what was asked for"
    if facts.head is not None:
        assert FORMATS[facts.head].on_cpu
        assert FORMATS[facts.head].error < facts.error
    assert (name in STORED) == (name in facts.takes), "what files of ours hold is used as it is stored"


def test_the_finest_stored_format_is_the_finest():
    assert min(STORED, key=lambda name: FORMATS[name].error) == FINEST_STORED


@every_format
def test_a_linear_layer_is_close_to_the_float_one_and_reads_back(name, implementation):
    loaded = tensors()
    layer = linear(name, loaded)
    x = normal(7, IN_SIZE, seed=9)

    assert distance(layer(x), product(x, loaded)) < tolerance(name)

    for weight in layer.weights(""):
        assert distance(weight.read(), loaded[weight.name]) <= FORMATS[name].error, weight.name


@every_format
def test_packed_weights_take_the_bytes_that_the_facts_say(name):
    if FORMATS[name].on_cpu and why_not():
        pytest.skip(why_not())
    layer = linear(name, tensors())
    data = layer.packed.data

    assert data.numel() * data.element_size() == sum(SIZES.values()) * IN_SIZE * FORMATS[name].itemsize(4)
    assert {weight.itemsize for weight in layer.weights("") if "weight" in weight.name} == {FORMATS[name].itemsize(4)}


@pytest.mark.parametrize("name", [name for name, facts in FORMATS.items() if facts.on_cpu])
def test_a_row_has_its_bits_whatever_is_beside_it(name, implementation):
    layer = linear(name, tensors())
    x = normal(40, IN_SIZE, seed=9)

    whole = layer(x)

    for rows in (1, 2, 13):
        assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer(x[-rows:]), whole[-rows:])


@every_format
def test_what_a_layer_keeps_makes_another_with_its_bits(name, implementation):
    layer = linear(name, tensors())
    other = linear(name, tensors(seed=50))
    x = normal(5, IN_SIZE, seed=9)

    other.restore(dict(layer.kept()))

    assert torch.equal(other(x), layer(x))


@every_format
def test_a_projection_that_is_replaced_leaves_the_other_as_it_is(name):
    if FORMATS[name].on_cpu and why_not():
        pytest.skip(why_not())
    old, new = tensors(), tensors(seed=50)
    layer = linear(name, old)
    x = normal(5, IN_SIZE, seed=9)
    before = layer(x)

    staged = layer.staged({"k_proj.weight": new["k_proj.weight"]})

    assert torch.equal(layer(x), before), "nothing changes before it is restored"
    layer.restore(staged)
    assert torch.equal(layer(x), linear(name, old | {"k_proj.weight": new["k_proj.weight"]})(x))
    layer.restore(layer.staged(new))
    assert torch.equal(layer(x), linear(name, new)(x))


def test_blocks_beside_a_projection_that_is_replaced_keep_their_values_each_time():
    """The first time the product becomes one of floats."""
    if why_not():
        pytest.skip(why_not())
    blocks = torch.from_numpy(np.random.default_rng(1).integers(1, 60, (32, IN_SIZE // 32 * 18), dtype=np.uint8))
    given = BlockMatrix(BLOCK_TYPES[2], blocks)
    layer = Linear(IN_SIZE, {"a": 32, "b": 32}, Placement(torch.device("cpu"), torch.bfloat16, 32, "gguf"))
    for weight in layer.weights(""):
        assert weight.load_quantized is not None
        weight.load_quantized(given)

    for seed in (1, 2):
        new = normal(32, IN_SIZE, seed=seed)
        layer.restore(layer.staged({"a.weight": new}))
        assert torch.equal(kernels.unpack_linear(layer.packed), torch.cat([new.bfloat16().float(), given.dequantize()]))


@every_format
def test_a_projection_without_a_bias_is_as_one_with_zeros(name):
    if FORMATS[name].on_cpu and why_not():
        pytest.skip(why_not())
    given = tensors() | {"k_proj.bias": torch.zeros(SIZES["k_proj"])}
    placement = Placement(torch.device("cpu"), torch.float32, 32, name)
    layer = Linear(IN_SIZE, SIZES, placement, bias=True, unbiased=("k_proj",))
    loading = {weight.name: weight for weight in layer.weights("")}
    for weight in loading.values():
        weight.load(given[weight.name])
    x = normal(5, IN_SIZE, seed=9)

    assert loading.keys() == {"q_proj.weight", "q_proj.bias", "k_proj.weight"}
    assert torch.equal(layer(x), linear(name, given)(x))
    assert torch.equal(loading["q_proj.bias"].read(), given["q_proj.bias"])

    for changes in ({"q_proj.bias": normal(64, seed=3)}, {"k_proj.weight": normal(32, IN_SIZE, seed=4)}):
        given |= changes
        layer.restore(layer.staged(changes))
        assert torch.equal(layer(x), linear(name, given)(x))


@pytest.mark.parametrize(("name", "taken"), [(name, taken) for name in NAMES for taken in FORMATS[name].takes])
def test_stored_matrices_are_taken_as_they_are(name, taken):
    if why_not():
        pytest.skip(why_not())
    layer = Linear(IN_SIZE, {"a": 64}, Placement(torch.device("cpu"), torch.float32, 32, name))
    matrix = integer_format(taken).quantize(normal(64, IN_SIZE))
    (weight,) = layer.weights("")
    assert weight.load_quantized is not None

    weight.load_quantized(matrix)

    kept = kernels.packed_rows(layer.packed, slice(0, 64))
    assert isinstance(kept, QuantizedMatrix)
    assert kept.scheme == taken
    assert torch.equal(kept.codes, matrix.codes)


@every_format
def test_a_format_takes_stored_matrices_only_if_it_has_codes(name):
    layer = Linear(IN_SIZE, {"a": 64}, Placement(torch.device("cpu"), torch.float32, 32, name))
    (weight,) = layer.weights("")
    assert (weight.load_quantized is not None) == FORMATS[name].keeps_stored


@every_format
def test_an_adapter_adds_its_product_to_the_rows_that_use_it(name, implementation):
    layer = linear(name, tensors())
    x, a, b = normal(6, IN_SIZE, seed=9), normal(4, IN_SIZE, seed=10), normal(32, 4, seed=11)
    before = layer(x)
    rows = LoraRows(6, ((1, slice(2, 5)),))
    part = LoraPart(slice(0, 4), layer.columns("k_proj"), kernels.pack_linear(b))

    layer.adapters = LinearAdapters(LoraStep(rows), {1: LoraFactors(kernels.pack_linear(a), (part,))})

    added = layer(x) - before
    assert distance(added[2:5, 64:], x[2:5] @ a.T @ b.T) < 1e-5
    added[2:5, 64:] = 0
    assert not added.any()


@every_format
def test_experts_are_close_to_the_float_ones(name, implementation):
    moe = MoeConfig(num_experts=6, num_experts_per_tok=2, intermediate_size=64, norm_topk_prob=True)
    device = torch.device("cpu")
    exact = SparseMoe(IN_SIZE, moe, "silu", Placement(device, torch.float32, 32))
    rounded = SparseMoe(IN_SIZE, moe, "silu", Placement(device, torch.float32, 32, name))
    for seed, (weight, other) in enumerate(zip(exact.weights("mlp"), rounded.weights("mlp"), strict=True)):
        given = normal(*weight.shape, seed=seed) / 8
        weight.load(given)
        other.load(given)
    x = normal(20, IN_SIZE, seed=99)
    want = exact(x)
    # Two products, one behind the other.
    assert distance(rounded(x), want) < 2.5 * FORMATS[name].error + 1e-5
