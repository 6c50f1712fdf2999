"""Linear layers in Triton: one row, 4-bit weights of several rows, and what is left to torch."""

import pytest
import torch

from headrace import kernels
from headrace.kernels.packing import PackedLinear
from headrace.kernels.torch_quantized import pack_fp8, pack_int4, unpack_int4
from headrace.layers.quantization import integer_format

# k is a multiple of the tiles, of some of them, and of none.
SIZES = [(72, 192), (16, 4096), (48, 1056)]


def weight_of(kind: str, n: int, k: int, bias: bool, device: torch.device) -> PackedLinear:
    weight, added = torch.randn(n, k, device=device) / 16, torch.randn(n, device=device) if bias else None
    if kind == "torch":
        return PackedLinear(n, k, "torch", weight, added)
    if kind == "torch_fp8":
        return pack_fp8(weight[: n // 16 * 16], None if added is None else added[: n // 16 * 16], True)
    return pack_int4(integer_format("int4").quantize(weight), added)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("kind", ["torch", "torch_fp8", "torch_int4"])
def test_one_row(triton_device, kind, n, k):
    from headrace.kernels.triton.linear import linear

    packed = weight_of(kind, n, k, k != 192, triton_device)
    x = torch.randn(1, k, device=triton_device)
    want = x @ kernels.unpack_linear(packed).float().T + (0 if packed.bias is None else packed.bias)

    got = linear(x, packed, None, False)
    out = torch.ones_like(got)
    linear(x, packed, out, True)

    # Products of several rows see 4-bit weights rounded to bfloat16, those of one row do not.
    tolerance = 2e-2 if kind == "torch_int4" else 1e-4
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out, got + 1)


@pytest.mark.parametrize("rows", [2, 40, 130])
@pytest.mark.parametrize(("n", "k"), SIZES[::2])
def test_rows_of_4_bit_weights(triton_device, n, k, rows):
    from headrace.kernels.triton.linear import linear

    packed = weight_of("torch_int4", n, k, True, triton_device)
    x = torch.randn(rows, k, device=triton_device)
    want = x @ unpack_int4(packed).float().T + packed.bias

    got = linear(x, packed, None, False)
    out = torch.ones_like(got)
    linear(x, packed, out, True)

    # In float32 they are not rounded to bfloat16 here, but they are in `unpack_int4`.
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out, got + 1)


@pytest.mark.parametrize(("n", "k"), [(13, 1056), (32, 4096)])
def test_one_row_of_4_bit_weights_in_the_shapes_of_every_width(triton_device, n, k):
    from headrace.kernels.triton.one_row import SHAPES, one_row_linear

    packed = weight_of("torch_int4", n, k, True, triton_device)
    x = torch.randn(1, k, device=triton_device)
    want = x @ unpack_int4(packed).float().T + packed.bias
    for _, shape in SHAPES["torch_int4"]:
        out = torch.empty(1, n, device=triton_device)
        one_row_linear(x, packed, out, False, shape)
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def test_unpacked_in_triton_and_in_torch(triton_device):
    from headrace.kernels.triton.linear import unpack_int4 as unpack

    packed = weight_of("torch_int4", 24, 1056, False, triton_device)

    torch.testing.assert_close(unpack(packed, torch.float32), unpack_int4(packed).float(), rtol=1e-2, atol=1e-4)


def test_a_row_is_rounded_to_fp8_by_its_own_largest_value(triton_device):
    from headrace.kernels.triton.linear import fp8_values

    x = torch.tensor([[0.0, 0.0, 0.0], [-7.0, 3.5, 1.75], [448.0, 0.0, 2.0]], device=triton_device)

    values, scales = fp8_values(x)

    assert values.float().tolist() == [[0, 0, 0], [-448, 224, 112], [448, 0, 2]]
    assert scales[1:].flatten().tolist() == [7 / 448, 1.0]


def test_what_does_not_fit_is_refused(triton_device):
    from headrace.kernels.triton.linear import linear

    packed = weight_of("torch_int4", 24, 1056, False, triton_device)
    x = torch.randn(1, 1056, device=triton_device)

    with pytest.raises(ValueError, match="accumulate needs out"):
        linear(x, packed, None, True)
    with pytest.raises(ValueError, match="out must be"):
        linear(x, packed, torch.empty(1, 23, device=triton_device), False)
    assert linear(x[:0], packed, None, False).shape == (0, 24)
