"""The weight formats of GPUs, by the same torch kernels on the CPU."""

import pytest
import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.errors import ModelError
from headrace.kernels import linear
from headrace.kernels.torch_quantized import (
    fp8_product,
    int4_codes,
    int4_product,
    pack_fp8,
    pack_int4,
    unpack_fp8,
    unpack_int4,
    why_not_fp8,
    why_not_int4,
)
from headrace.layers.linear import Linear
from headrace.layers.quantization import integer_format
from headrace.layers.weight import Placement

# e4m3 keeps 3 bits after the leading one: 2^-4 at most for a value, about half of that for a sum of many.
FP8_ERROR = 0.04
# What bfloat16 scales and sums add to products of the same weights.
BF16_ERROR = 0.01


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_an_fp8_product_is_close_to_the_float_one(per_row, rows):
    weight, x = random(48, 64), random(rows, 64, seed=1)
    # One token and one output much larger than the others: a scale in all costs the small ones their bits.
    x[0] *= 100
    packed = pack_fp8(weight, None, per_row)

    got = fp8_product(x, packed)

    assert (got.shape, packed.data.dtype) == ((rows, 48), torch.float8_e4m3fn)
    assert packed.column_scales is not None
    assert packed.column_scales.shape == ((48,) if per_row else (1,))
    assert 0 < distance(got[:1], x[:1] @ weight.T) < FP8_ERROR
    if per_row and rows > 1:
        assert distance(got[1:], x[1:] @ weight.T) < FP8_ERROR


@pytest.mark.parametrize("per_row", [True, False])
def test_fp8_weights_that_were_unpacked_pack_to_the_same_bits(per_row):
    packed = pack_fp8(random(32, 64) * 3e-4, None, per_row)

    again = pack_fp8(unpack_fp8(packed), None, per_row)

    assert torch.equal(again.data.view(torch.uint8), packed.data.view(torch.uint8))
    assert torch.equal(again.column_scales, packed.column_scales)


def test_fp8_takes_zeros_nothing_and_nan_as_they_come():
    weight = random(16, 32)
    weight[3] = 0
    packed = pack_fp8(weight, torch.arange(16.0), True)
    x = random(3, 32, seed=2)
    x[0], x[2, 5] = 0, torch.nan

    got = linear(x, packed)

    assert got[0].tolist() == list(range(16)), "the bias"
    assert got[1, 3] == 3
    assert got[1].isfinite().all()
    assert got[2].isnan().all()
    assert linear(x[:0], packed).shape == (0, 16)
    assert why_not_fp8(16, 40)
    assert not why_not_fp8(16, 48)


@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize(("k", "group"), [(128, 32), (128, 128), (256, 256), (192, 64), (96, 96)])
def test_an_int4_product_is_that_of_the_stored_codes(k, group, minimums):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32, k), generator=generator, dtype=torch.uint8)
    scales = torch.rand(32, k // group, generator=generator) + 0.5
    zeros = torch.randint(0, 16, scales.shape, generator=generator)
    matrix = QuantizedMatrix("int4", codes, scales, scales * zeros if minimums else None, group)
    x = random(5, k, seed=1)

    packed = pack_int4(matrix, None)

    assert distance(int4_product(x, packed), x @ matrix.dequantize().T) < BF16_ERROR
    assert distance(unpack_int4(packed), matrix.dequantize()) < BF16_ERROR


def test_four_words_hold_32_codes():
    codes = torch.arange(64).reshape(1, 64).remainder(16).to(torch.uint8)
    matrix = QuantizedMatrix("int4", codes, torch.ones(1, 2), torch.zeros(1, 2), 32)

    packed = pack_int4(matrix, None)

    # Word j of a unit has codes j, j + 4, ... of it, from the lowest bits on.
    assert [f"{word & 0xFFFFFFFF:08x}" for word in packed.data[0].tolist()] == [
        "c840c840", "d951d951", "ea62ea62", "fb73fb73"
    ] * 2  # fmt: skip
    assert int4_codes(packed).tolist() == codes.tolist()


def test_what_int4_cannot_hold_is_said():
    assert not why_not_int4(12, 128, 128)
    assert "multiples of 32" in why_not_int4(64, 48, 48)
    assert "multiples of 32" in why_not_int4(64, 160, 64)


def test_a_linear_layer_in_fp8_gives_back_and_replaces_its_parts():
    placement = Placement(torch.device("cpu"), torch.float32, 8, "fp8")
    layer = Linear(64, {"q": 32, "k": 16}, placement, bias=True)
    parts = {"q": random(32, 64), "k": random(16, 64, seed=1)}
    for weight in layer.weights(""):
        name, _, kind = weight.name.partition(".")
        weight.load(parts[name] if kind == "weight" else torch.ones(len(parts[name])))
        assert weight.load_quantized is None
    before = layer.packed
    x = random(3, 64, seed=2)
    assert distance(layer(x), x @ torch.cat(list(parts.values())).T + 1) < FP8_ERROR

    layer.restore(layer.staged({"k.weight": 2 * parts["k"]}))

    read = {weight.name: weight.read() for weight in layer.weights("")}
    assert torch.equal(layer.packed.data[:32].view(torch.uint8), before.data[:32].view(torch.uint8)), "q is what it was"
    assert distance(read["k.weight"], 2 * parts["k"]) < FP8_ERROR


def test_an_int4_stack_is_not_replaced_in_parts():
    placement = Placement(torch.device("cpu"), torch.float32, 8, "int4")
    layer = Linear(64, {"q": 32, "k": 16}, placement)
    packed = pack_int4(integer_format("int4").quantize(random(48, 64)), None)
    layer.restore({name: getattr(packed, name) for name in packed.__dataclass_fields__})

    with pytest.raises(ModelError, match="together"):
        layer.staged({"k.weight": random(16, 64)})
