"""Quantised linear layers: exact integers on every instruction set, right against float64, a row's bits its own."""

import pytest
import torch

from headrace import kernels
from headrace.checkpoint.quantized_matrix import (
    QuantizedMatrix,
    rotated_rows,
    rotated_weights,
    rotation_block,
    stack,
    unrotated_weights,
)
from headrace.checkpoint.weight_formats import FORMATS, KERNEL_GROUP, MAX_WORDS_NORM, WIDE_GROUP, codes_of
from headrace.kernels import cpu
from headrace.kernels.packing import QUANTIZED_LAYOUTS
from headrace.kernels.quantized_packing import (
    half_scales,
    pack_native_quantized,
    quantized_matrix,
    unpack_linear,
)
from headrace.layers.quantization import integer_format

# Rotated rows have blocks of 128 elements, of 64 and of 32 (in groups of 128, the last one shorter), or none.
SHAPES = [(1, 64), (31, 1), (32, 32), (33, 77), (96, 300), (257, 129), (100, 1030), (40, 384), (70, 576), (33, 288)]
ROWS = [1, 2, 3, 5, 6, 7, 12, 13, 25, 61, 193, 257]
KINDS = list(QUANTIZED_LAYOUTS)


def random_matrix(kind: str, n: int, k: int, seed: int = 0) -> QuantizedMatrix:
    """Every code, signed scales of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    scheme = QUANTIZED_LAYOUTS[kind].scheme
    grid = codes_of(scheme)
    if grid.max_norm is not None:
        weight = torch.randn(n, k, generator=generator) * torch.logspace(-4, 2, n)[:, None]
        return integer_format(scheme).quantize(weight)
    codes = torch.randint(0, 2**grid.bits, (n, k), generator=generator, dtype=getattr(torch, grid.dtype))
    group = k if grid.scale_per_row else KERNEL_GROUP
    groups = -(-k // group)
    scales = (
        torch.randn(n, groups, generator=generator) * 0.01 * 4.0 ** torch.randint(-4, 5, (n, 1), generator=generator)
    )
    minimums = (
        torch.randn(n, groups, generator=generator) * scales.abs() * 8 if QUANTIZED_LAYOUTS[kind].minimums else None
    )
    return QuantizedMatrix(scheme, codes, scales, minimums, group)


def used_weights(matrix: QuantizedMatrix) -> torch.Tensor:
    """What the codes stand for in float64, scales rounded as they are packed: rotated weights where rows are rotated."""
    return quantized_matrix(pack_native_quantized(matrix, None)).values().double()


def used_activations(x: torch.Tensor, matrix: QuantizedMatrix) -> torch.Tensor:
    """x in float64 as the kernel sees it, rotated where weights are."""
    rounding = FORMATS[matrix.scheme].activations
    assert rounding is not None, matrix.scheme
    values, scales = kernels.quantize_rows(x, group=rounding.group, bits=rounding.bits, rotated=rounding.rotated)
    return values.double() * scales.double().repeat_interleave(rounding.group, 1)[:, : x.shape[1]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_for_every_number_of_rows(implementation, shape, kind):
    n, k = shape
    matrix, bias = random_matrix(kind, n, k), torch.randn(n)
    packed, weight = kernels.pack_linear(matrix, bias), used_weights(matrix)
    summed = weight.abs()
    if matrix.minimums is not None:  # codes and minimums are summed apart
        summed = summed + 2 * matrix.minimums.abs().double().repeat_interleave(KERNEL_GROUP, 1)[:, :k]
    for rows in ROWS:
        x = torch.randn(rows, k)

        y = kernels.linear(x, packed)

        seen = used_activations(x, matrix)
        # The integers are exact; float32 rounds the sum over groups, in units of what it sums.
        unit = (seen.abs() @ summed.T + bias.abs()) * 2.0**-23
        assert y.shape == (rows, n)
        assert ((y - (seen @ weight.T + bias.double())).abs() <= 4 * unit + 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_equals_the_row_in_any_batch(implementation, kind):
    packed = kernels.pack_linear(random_matrix(kind, 70, 513), torch.randn(70))
    x = torch.randn(257, 513)
    whole = kernels.linear(x, packed)
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(kernels.linear(x[-rows:], packed), whole[-rows:])


@pytest.mark.parametrize("kind", KINDS)
def test_accumulate_adds_to_out_and_leaves_its_neighbours(implementation, kind):
    matrix = random_matrix(kind, 50, 96)
    packed = kernels.pack_linear(matrix)
    for rows in (1, 7, 20):
        x, wide = torch.randn(rows, 96), torch.randn(rows, 80)
        before = wide.clone()

        y = kernels.linear(x, packed, wide[:, 16:66], accumulate=True)

        assert y.data_ptr() == wide[:, 16:66].data_ptr()
        assert torch.equal(wide[:, 16:66], before[:, 16:66] + kernels.linear(x, packed))
        assert torch.equal(wide[:, :16], before[:, :16])
        assert torch.equal(wide[:, 66:], before[:, 66:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_or_infinity_stays_in_its_row(implementation, kind):
    packed = kernels.pack_linear(random_matrix(kind, 40, 100))
    x = torch.randn(30, 100)
    clean = kernels.linear(x, packed)
    x[7, 3], x[9, 99] = torch.nan, -torch.inf
    y = kernels.linear(x, packed)
    assert not y[7].isfinite().any()
    assert not y[9].isfinite().any()
    others = [row for row in range(30) if row not in (7, 9)]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("kind", KINDS)
def test_thread_counts_and_wide_instruction_sets_give_equal_bits(native, kind):
    packed, x = kernels.pack_linear(random_matrix(kind, 200, 700), torch.randn(200)), torch.randn(130, 700)
    results = []
    for isa in [isa for isa, reason in cpu.isas() if not reason and isa != "baseline"]:
        cpu.select_isa(isa)
        for threads in (1, 2, 5):
            kernels.set_num_threads(threads)
            results.append(kernels.linear(x, packed))
    assert all(torch.equal(result, results[0]) for result in results)


def test_extreme_codes_and_activations_give_the_exact_integer_on_every_instruction_set(implementation):
    # Weights -128 and 127 against activations of -127 and 127: the largest sums that bytes can make.
    codes = torch.tensor([0, 255], dtype=torch.uint8).repeat(32, 256)
    matrix = QuantizedMatrix("int8-fast", codes, torch.ones(32, 1), None, 512)
    x = torch.full((3, 512), 127.0)
    x[1] = -127.0
    x[2, 1::2] = -127.0

    # The rows whose rotation gives these.
    y = kernels.linear(rotated_weights(x), kernels.pack_linear(matrix))

    assert y[:, 0].tolist() == [-127 * 256, 127 * 256, -127 * 255 * 256]


@pytest.mark.parametrize("zero", [8, 0])
def test_the_largest_codes_of_4_bits_give_the_exact_integer_on_every_instruction_set(implementation, zero):
    # What 16-bit sums of a group may hold: 32 codes of 15 against activations of 127 or -127.
    codes = torch.full((32, 64), 15, dtype=torch.uint8)
    matrix = QuantizedMatrix("int4", codes, torch.ones(32, 2), None if zero else torch.zeros(32, 2), KERNEL_GROUP)
    x = torch.full((13, 64), 127.0)
    x[1::2] = -127.0

    y = kernels.linear(x, kernels.pack_linear(matrix))

    assert torch.equal(y[:, 0], (15 - zero) * 127 * 64 * x[:, 0].sign())


def test_the_largest_words_give_the_exact_integer_on_every_instruction_set(implementation):
    # 128 weights of the largest norm against activations of the largest magnitude: 2^31 - 1 is not reached, and nothing wraps.
    code = int(MAX_WORDS_NORM / WIDE_GROUP**0.5)
    codes = torch.full((32, 256), code, dtype=torch.int16)
    codes[1] = -code
    matrix = QuantizedMatrix("int16", codes, torch.ones(32, 1), None, 256)
    x = torch.full((2, 256), 8191.0)
    x[1] = -8191.0

    y = kernels.linear(x, kernels.pack_linear(matrix))

    # 2^31 - 2.6 million a group of 128: a float32 is within 128 of it.
    want = 128 * code * 8191
    assert want > 0.998 * 2**31
    assert y[0, 0].item() == pytest.approx(2 * want, abs=512)
    assert y[:, :2].tolist() == [[y[0, 0].item(), -y[0, 0].item()], [-y[0, 0].item(), y[0, 0].item()]]


def test_words_whose_sums_could_overflow_are_refused(implementation):
    codes = torch.zeros(8, 300, dtype=torch.int16)
    codes[5, 290] = MAX_WORDS_NORM + 1
    with pytest.raises(ValueError, match="norm of at most"):
        kernels.pack_linear(QuantizedMatrix("int16", codes, torch.ones(8, 1), None, 300))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("group", [32, 128, 77])
def test_quantised_rows_are_the_nearest_steps(implementation, group, bits):
    x = torch.randn(9, 77) * torch.logspace(-6, 3, 9)[:, None]
    x[4] = 0.0
    values, scales = kernels.quantize_rows(x, group=group, bits=bits)
    step = scales.repeat_interleave(group, 1)[:, :77]
    limit = 127 if bits == 8 else 8191
    assert values.dtype == (torch.int8 if bits == 8 else torch.int16)
    assert int(values.min()) >= -limit
    assert int(values.max()) == limit
    assert not values[4].any()
    assert ((values * step - x).abs() <= 0.501 * step).all()
    assert torch.equal(kernels.quantize_rows(x[3:4], group=group, bits=bits)[0], values[3:4])
    assert kernels.quantize_rows(x[:0], group=group, bits=bits)[0].shape == (0, 77)


def test_rows_are_not_cut_into_groups_that_the_kernels_lack(implementation):
    with pytest.raises(ValueError, match="multiple of 32 or a whole row"):
        kernels.quantize_rows(torch.randn(2, 77), group=40)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("k", [333, 384, 576, 288])
def test_instruction_sets_quantise_to_equal_bits(native, k, rotated):
    x = torch.randn(20, k)
    for group, bits in ((32, 8), (128, 8)) if rotated else ((32, 8), (128, 8), (k, 8), (128, 16)):
        results = []
        for isa in [isa for isa, reason in cpu.isas() if not reason]:
            cpu.select_isa(isa)
            results.append(kernels.quantize_rows(x, group=group, bits=bits, rotated=rotated))
        with kernels.prefer("torch"):
            results.append(kernels.quantize_rows(x, group=group, bits=bits, rotated=rotated))
        for values, scales in results:
            assert torch.equal(values, results[0][0])
            assert torch.equal(scales, results[0][1])


@pytest.mark.parametrize("k", [384, 576, 288, 77])
def test_a_rotation_spreads_a_large_element_and_leaves_the_products(k):
    weight, x = torch.randn(30, k, dtype=torch.float64), torch.randn(9, k, dtype=torch.float64)
    x[:, 0] = 1000.0

    rotated = rotated_rows(x)

    assert torch.allclose(rotated @ rotated_weights(weight).T, x @ weight.T, rtol=1e-12, atol=1e-9)
    assert torch.allclose(unrotated_weights(rotated_weights(weight)), weight, rtol=0.0, atol=1e-12)
    block = rotation_block(k)
    assert block == {384: 128, 576: 64, 288: 32, 77: 1}[k]
    # All of a block are about 1000 now, and nothing else is.
    assert torch.allclose(rotated[:, :block].abs(), torch.tensor(1000.0).double(), rtol=0.1)
    assert rotated[:, block:].abs().max() < 100


def test_rows_are_rotated_in_groups_that_divide_128(implementation):
    with pytest.raises(ValueError, match="divide 128"):
        kernels.quantize_rows(torch.randn(2, 256), group=256, rotated=True)
    assert kernels.quantize_rows(torch.randn(0, 256), group=128, rotated=True)[0].shape == (0, 256)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(33, 77), (64, 96)], ids=str)
def test_half_precision_scales_survive_packing_exactly(kind, shape):
    matrix = random_matrix(kind, *shape)
    scales = matrix.scales.half().float()
    minimums = None if matrix.minimums is None else matrix.minimums.half().float()
    matrix = QuantizedMatrix(matrix.scheme, matrix.codes, scales, minimums, matrix.group_size)
    want = matrix.dequantize()
    got = unpack_linear(pack_native_quantized(matrix, None))
    assert torch.equal(got, want)


def test_tiny_and_huge_scales_keep_eleven_bits():
    scales = torch.tensor([[3e-30, 1.1e-30], [7e20, 3e20], [0.0, 0.0]])
    matrix = QuantizedMatrix("int4", torch.zeros(3, 64, dtype=torch.uint8), scales, None, 32)
    halves, _, columns = half_scales(matrix)
    assert torch.allclose(halves.float() * columns[:, None], scales, rtol=2.0**-11, atol=0.0)


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_one_scale_a_row_keeps_all_its_bits(scheme):
    codes = torch.randint(0, 16, (33, 96), dtype=torch.uint8)
    matrix = QuantizedMatrix(scheme, codes, torch.rand(33, 1) + 0.1, None, 96)
    packed = pack_native_quantized(matrix, None)
    assert torch.equal(unpack_linear(packed), matrix.dequantize())


def test_scales_that_round_to_the_same_are_packed_to_the_same_bytes():
    scales = torch.tensor([[1.0001, 1.0002], [0.3, 0.3]])
    matrix = QuantizedMatrix("int8", torch.full((2, 64), 7, dtype=torch.uint8), scales, None, 32)
    packed = pack_native_quantized(matrix, None)
    again = pack_native_quantized(quantized_matrix(packed), None)
    assert torch.equal(again.data, packed.data)
    assert torch.equal(again.column_scales, packed.column_scales)


@pytest.mark.parametrize("largest", [1.0, 1.0 - 2.0**-13, 1.0 - 2.0**-11, 2.0**-140, 0.75])
def test_what_was_packed_is_packed_to_the_same_bytes(largest):
    matrix = random_matrix("native_int4_min", 33, 96)
    scales = matrix.scales / matrix.scales.amax() / 8
    minimums = matrix.minimums / matrix.minimums.abs().amax() / 8
    minimums[:, 0] = largest
    packed = pack_native_quantized(QuantizedMatrix("int4", matrix.codes, scales, minimums, 32), None)
    again = pack_native_quantized(quantized_matrix(packed), None)
    assert torch.equal(again.data, packed.data)
    assert torch.equal(again.column_scales, packed.column_scales)
    assert torch.equal(unpack_linear(again), unpack_linear(packed))


def test_large_groups_are_the_small_ones_repeated():
    matrix = random_matrix("native_int4_min", 40, 256)
    wide = QuantizedMatrix("int4", matrix.codes, matrix.scales[:, ::4], matrix.minimums[:, ::4], 128)
    assert torch.equal(wide.regrouped(32).dequantize(), wide.dequantize())
    assert torch.equal(used_weights(wide), used_weights(wide.regrouped(32)))


def test_stacked_parts_keep_their_weights():
    symmetric, other = random_matrix("native_int4", 20, 128), random_matrix("native_int4_min", 13, 128, seed=1)
    wide = QuantizedMatrix("int4", symmetric.codes, symmetric.scales[:, ::2], None, 64)
    whole = stack([symmetric, wide, other])
    assert torch.allclose(
        whole.dequantize(), torch.cat([part.dequantize() for part in (symmetric, wide, other)]), rtol=1e-6, atol=1e-7
    )


def test_matrices_that_do_not_fit_are_refused(implementation):
    good = random_matrix("native_int8", 8, 64)
    with pytest.raises(ValueError, match="scales must be"):
        kernels.pack_linear(QuantizedMatrix("int8", good.codes, good.scales[:, :1], None, 32))
    with pytest.raises(ValueError, match="minimums"):
        kernels.pack_linear(QuantizedMatrix("int8", good.codes, good.scales, good.scales, 32))
    with pytest.raises(ValueError, match="codes must be"):
        kernels.pack_linear(QuantizedMatrix("int8", good.codes.int(), good.scales, None, 32))
    with pytest.raises(ValueError, match="groups of 16"):
        kernels.pack_linear(QuantizedMatrix("int8", good.codes, torch.ones(8, 4), None, 16))
    with pytest.raises(ValueError, match="bias must be"):
        kernels.pack_linear(good, torch.ones(9))
