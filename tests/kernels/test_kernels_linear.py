"""Linear layers: right against float64, and a row's bits never depend on the rows beside it."""

import pytest
import torch

from headrace import kernels
from headrace.kernels import cpu

SHAPES = [(1, 64), (31, 1), (32, 32), (33, 77), (96, 300), (65, 513), (257, 129), (100, 1030)]
ROWS = [1, 2, 3, 5, 6, 7, 12, 13, 25, 60, 61, 73, 193, 257]


def tolerance(k: int) -> float:
    # A chain of k float32 additions of unit-variance products: sqrt(k) values, each rounded to 2^-24 of up to sqrt(k).
    return 1e-6 * k**0.5 * max(1.0, k**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_for_every_number_of_rows(implementation, shape, dtype):
    n, k = shape
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n)
    packed = kernels.pack_linear(weight, bias)
    for rows in ROWS:
        x = torch.randn(rows, k)

        y = kernels.linear(x, packed)

        want = x.double() @ weight.double().T + bias.double()
        assert y.shape == (rows, n)
        assert y.dtype == torch.float32
        assert (y - want).abs().max() <= tolerance(k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", [(70, 77), (96, 513)], ids=str)
def test_a_row_alone_equals_the_row_in_any_batch(implementation, shape, dtype):
    n, k = shape
    packed = kernels.pack_linear(torch.randn(n, k).to(dtype), torch.randn(n))
    x = torch.randn(257, k)
    whole = kernels.linear(x, packed)
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(kernels.linear(x[-rows:], packed), whole[-rows:])
    for row in range(0, 257, 16):
        assert torch.equal(kernels.linear(x[row : row + 1], packed)[0], whole[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
def test_accumulate_adds_to_out_and_leaves_its_neighbours(implementation, dtype):
    weight = torch.randn(50, 300).to(dtype)
    packed = kernels.pack_linear(weight)
    for rows in (1, 7, 20, 100):
        x, wide = torch.randn(rows, 300), torch.randn(rows, 80)
        before = wide.clone()

        y = kernels.linear(x, packed, wide[:, 16:66], accumulate=True)

        assert y.data_ptr() == wide[:, 16:66].data_ptr()
        assert (wide[:, 16:66] - (before[:, 16:66].double() + x.double() @ weight.double().T)).abs().max() < tolerance(
            300
        )
        assert torch.equal(wide[:, :16], before[:, :16])
        assert torch.equal(wide[:, 66:], before[:, 66:])


def test_accumulated_rows_do_not_depend_on_their_batch(implementation):
    packed = kernels.pack_linear(torch.randn(70, 700).bfloat16())
    x, start = torch.randn(90, 700), torch.randn(90, 70)
    whole = kernels.linear(x, packed, start.clone(), accumulate=True)
    for row in (0, 1, 44, 89):
        alone = kernels.linear(x[row : row + 1], packed, start[row : row + 1].clone(), accumulate=True)
        assert torch.equal(alone[0], whole[row])


def test_rows_of_a_wider_tensor(implementation):
    weight, wide = torch.randn(40, 64).half(), torch.randn(9, 200)
    packed = kernels.pack_linear(weight)
    y = kernels.linear(wide[:, 100:164], packed)
    assert torch.equal(y, kernels.linear(wide[:, 100:164].contiguous(), packed))
    assert (y - wide[:, 100:164].double() @ weight.double().T).abs().max() < tolerance(64)


def test_zero_rows_give_zero_rows(implementation):
    packed = kernels.pack_linear(torch.randn(40, 64).bfloat16(), torch.randn(40))
    assert kernels.linear(torch.empty(0, 64), packed).shape == (0, 40)


def test_a_nan_stays_in_its_row(implementation):
    packed = kernels.pack_linear(torch.randn(40, 64).bfloat16())
    x = torch.randn(30, 64)
    clean = kernels.linear(x, packed)
    x[7, 3] = torch.nan
    y = kernels.linear(x, packed)
    assert y[7].isnan().all()
    assert torch.equal(y[:7], clean[:7])
    assert torch.equal(y[8:], clean[8:])


def test_thread_counts_and_wide_instruction_sets_give_equal_bits(native):
    # Numbers that float16 and bfloat16 have, some of them subnormal in float16.
    weight, bias = (
        torch.randn(200, 700).mul_(2.0 ** torch.randint(-20, 1, (200, 700))).half().bfloat16(),
        torch.randn(200),
    )
    weight = torch.where(weight.half().float() == weight.float(), weight, 0.0)
    packed = [kernels.pack_linear(weight.to(dtype), bias) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    x = torch.randn(130, 700)
    results = []
    for isa in [isa for isa, reason in cpu.isas() if not reason and isa != "baseline"]:
        cpu.select_isa(isa)
        for threads in (1, 2, 5):
            kernels.set_num_threads(threads)
            results += [kernels.linear(x, one) for one in packed]
    assert ((weight != 0) & (weight.float().abs() < 2**-14)).sum() > 1000
    assert all(torch.equal(result, results[0]) for result in results)


def test_sizes_that_do_not_fit_are_refused(implementation):
    packed = kernels.pack_linear(torch.randn(40, 64))
    with pytest.raises(ValueError, match="x must be"):
        kernels.linear(torch.randn(3, 65), packed)
    with pytest.raises(ValueError, match="accumulate needs out"):
        kernels.linear(torch.randn(3, 64), packed, accumulate=True)
    with pytest.raises(ValueError, match="out"):
        kernels.linear(torch.randn(3, 64), packed, torch.empty(4, 40))
    with pytest.raises(ValueError, match="weight must be"):
        kernels.pack_linear(torch.randn(40))
    with pytest.raises(ValueError, match="bias must be"):
        kernels.pack_linear(torch.randn(40, 64), torch.randn(41))


def test_native_linear_refuses_other_dtypes_and_strides(native):
    packed = kernels.pack_linear(torch.randn(40, 64))
    with pytest.raises(ValueError, match="float32"):
        kernels.linear(torch.randn(3, 64).bfloat16(), packed)
    with pytest.raises(ValueError, match="contiguous rows"):
        kernels.linear(torch.randn(64, 3).T, packed)
