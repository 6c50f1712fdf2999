"""Products of bfloat16: the bits of the processor's instructions on every instruction set, right against float64, a row's bits its own."""

import numpy as np
import pytest
import torch

from headrace import kernels
from headrace.kernels import cpu

SHAPES = [(1, 64), (31, 1), (32, 32), (33, 77), (96, 300), (257, 129), (100, 1030)]
ROWS = [1, 2, 3, 5, 6, 7, 12, 13, 25, 61, 193, 257]
LEAST_NORMAL = 2.0**-126


def flushed(x: np.ndarray) -> np.ndarray:
    """float32 with zeros, of their sign, for denormals."""
    return np.where(np.abs(x) < np.float32(LEAST_NORMAL), np.copysign(np.float32(0), x), x)


def fused(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """a b + total with one rounding, and a 0 where that is denormal, of bfloat16 a and b as float32."""
    product, wide = a.astype(np.float64) * b, total.astype(np.float64)
    high = product + wide
    back = high - product
    low = (product - (high - back)) + (wide - back)  # what `high` lost (Knuth's TwoSum)
    # Rounded to odd in float64, then to nearest in float32: as if once (Boldo and Melquiond, 2008).
    is_even = high.view(np.int64) % 2 == 0
    toward = np.where(low > 0, np.inf, -np.inf)
    exact = np.where(np.isfinite(high) & (low != 0) & is_even, np.nextafter(high, toward), high)
    result = exact.astype(np.float32)
    is_tiny = np.abs(exact) < LEAST_NORMAL - 2.0**-151  # below the least normal after rounding to 24 bits
    return np.where(is_tiny, np.copysign(np.float32(0), result), result)


def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What `linear` gives: pairs of k in order, the odd element first, and zeros up to a multiple of 32 (-0 + 0 is 0)."""
    a, b = (flushed(tensor.bfloat16().float().numpy()) for tensor in (x, weight))
    a, b = (np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % 32))) for matrix in (a, b))
    total = np.zeros((a.shape[0], b.shape[0]), np.float32)
    with np.errstate(all="ignore"):
        for k in range(0, a.shape[1], 2):
            for element in (k + 1, k):
                total = fused(a[:, element, None], b[None, :, element], total)
    return torch.from_numpy(total)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits, but for those of a NaN."""
    is_nan = want.isnan()
    return torch.equal(got.isnan(), is_nan) and torch.equal(
        got[~is_nan].view(torch.int32), want[~is_nan].view(torch.int32)
    )


def ordered_isas() -> list[str]:
    """Instruction sets that run here and add in the order of the model. Tiles of AMX do not."""
    return [isa for isa, reason in cpu.isas() if not reason and isa != "amx"]


def on_every_isa(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """x @ weight^T by each instruction set; torch sums in an order of its own."""
    packed, results = kernels.pack_linear(weight, rounded=True), []
    for isa in ordered_isas():
        cpu.select_isa(isa)
        results.append(kernels.linear(x, packed))
    return results


def random_values(rows: int, k: int, exponents: tuple[int, int], seed: int) -> torch.Tensor:
    """Floats of every fraction and sign, with exponents from this range."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**32, (rows, k), dtype=np.uint32) & 0x807FFFFF
    bits |= generator.integers(127 + exponents[0], 127 + exponents[1], (rows, k), dtype=np.uint32) << 23
    return torch.from_numpy(bits.view(np.float32))


@pytest.mark.parametrize("exponents", [(-8, 8), (-70, -60), (-65, -61), (-127, -50), (-127, 128), (55, 75)], ids=str)
def test_every_instruction_set_gives_the_bits_of_the_model(native, exponents):
    # The least ranges give sums about the least normal float, where a denormal is written as 0; the widest overflow.
    for k in (1, 2, 7, 66):
        x, weight = random_values(150, k, exponents, seed=k), random_values(64, k, exponents, seed=100 + k).bfloat16()
        want = model(x, weight)

        assert all(same(y, want) for y in on_every_isa(x, weight))


def test_special_values_give_the_bits_of_the_model(native):
    largest, tiny = 3.3895313892515355e38, 2.0**-133
    values = [0.0, -0.0, tiny, -127 * tiny, LEAST_NORMAL, -LEAST_NORMAL, 2.0**-64, -(2.0**-63), 1.0, -1.0, 2.0**64]
    values += [largest, -largest, torch.inf, -torch.inf, torch.nan]
    single = torch.tensor(values)
    pairs = torch.cartesian_prod(single, single)
    # Each pair behind one that leaves the least normal, and what is next to it, in the sum.
    for first in ([0.0, 0.0], [2.0**-63, 0.0], [2.0**-63 * 1.0078125, 0.0], [1.0, 2.0**-30]):
        start = torch.tensor(first).expand(len(pairs), 2)
        x, weight = torch.cat([start, pairs], dim=1), torch.cat([start, pairs.flip(1)], dim=1).bfloat16()
        want = model(x, weight)

        assert all(same(y, want) for y in on_every_isa(x, weight))


def test_activations_are_rounded_to_the_nearest_even(implementation):
    ties = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -(1.0 + 2.0**-8), 1.0 + 2.0**-8 + 2.0**-20, 3.4e38, 1e-39])
    nearest = torch.tensor([1.0, 1.0 + 2.0**-6, -1.0, 1.0 + 2.0**-7, torch.inf, 0.0])
    x = torch.zeros(6, 40)
    x[:, 33] = ties
    weight = torch.zeros(3, 40)
    weight[:, 33] = torch.tensor([1.0, 0.5, -2.0])

    y = kernels.linear(x, kernels.pack_linear(weight.bfloat16(), rounded=True))

    keeps_denormals = implementation == "torch"
    assert torch.equal(y[: 5 if keeps_denormals else 6, 0], nearest[: 5 if keeps_denormals else 6])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_for_every_number_of_rows(implementation, shape):
    n, k = shape
    weight, bias = torch.randn(n, k).bfloat16(), torch.randn(n)
    packed = kernels.pack_linear(weight, bias, rounded=True)
    for rows in ROWS:
        x = torch.randn(rows, k)

        y = kernels.linear(x, packed)

        seen = x.bfloat16().double()
        unit = (seen.abs() @ weight.double().T.abs() + bias.abs()) * 2.0**-23
        assert y.shape == (rows, n)
        assert ((y - (seen @ weight.double().T + bias.double())).abs() <= 2 * k**0.5 * unit).all()


@pytest.mark.parametrize("k", [513, 4200])  # 4,200: several parts of K
def test_a_row_alone_equals_the_row_in_any_batch(implementation, k):
    packed = kernels.pack_linear(torch.randn(70, k), torch.randn(70), rounded=True)
    x = torch.randn(257, k)
    whole = kernels.linear(x, packed)
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(kernels.linear(x[-rows:], packed), whole[-rows:])


def test_accumulate_adds_to_out_and_leaves_its_neighbours(implementation):
    packed = kernels.pack_linear(torch.randn(50, 96), rounded=True)
    for rows in (1, 7, 20):
        x, wide = torch.randn(rows, 96), torch.randn(rows, 80)
        before = wide.clone()

        y = kernels.linear(x, packed, wide[:, 16:66], accumulate=True)

        assert y.data_ptr() == wide[:, 16:66].data_ptr()
        assert torch.equal(wide[:, 16:66], before[:, 16:66] + kernels.linear(x, packed))
        assert torch.equal(wide[:, :16], before[:, :16])
        assert torch.equal(wide[:, 66:], before[:, 66:])


def test_threads_and_instruction_sets_give_equal_bits(native):
    packed, x = kernels.pack_linear(torch.randn(200, 700), torch.randn(200), rounded=True), torch.randn(130, 700)
    results = []
    for isa in ordered_isas():
        cpu.select_isa(isa)
        for threads in (1, 2, 5):
            kernels.set_num_threads(threads)
            results.append(kernels.linear(x, packed))
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_packed_weight_reads_back_and_is_looked_up(implementation):
    for n, k in SHAPES:
        weight = torch.randn(n, k).bfloat16()
        packed = kernels.pack_linear(weight, rounded=True)
        ids = torch.arange(n)

        assert torch.equal(kernels.unpack_linear(packed).bfloat16(), weight)
        assert torch.equal(kernels.embedding(ids, packed, 8.5), weight.float() * 8.5)
