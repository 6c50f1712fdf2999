"""Row ops: normalisation, rotary embedding, gated activations, embedding lookup, argmax."""

import pytest
import torch

from headrace import kernels
from headrace.kernels import cpu

SIZES = [1, 15, 16, 31, 32, 48, 49, 576, 1000]
ROWS = [0, 1, 3, 40, 257]
RELATIVE = 2e-6  # some units in the last place of float32


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_matches_float64(implementation, size):
    weight = torch.randn(size)
    for rows in ROWS:
        x, residual = torch.randn(rows, size), torch.randn(rows, size)
        summed = residual + x

        plain = kernels.rms_norm(x, weight, 1e-5)
        fused = kernels.rms_norm(x, weight, 1e-5, residual)

        for got, source in ((plain, x), (fused, summed)):
            wide = source.double()
            want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
            assert torch.allclose(got.double(), want, rtol=RELATIVE, atol=RELATIVE)
        assert torch.equal(residual, summed)


def test_a_normalised_row_does_not_depend_on_its_batch(implementation):
    wide, weight = torch.randn(100, 700), torch.randn(577)
    x = wide[:, 50:627]
    whole = kernels.rms_norm(x, weight, 1e-6)
    for row in (0, 1, 50, 99):
        assert torch.equal(kernels.rms_norm(x[row : row + 1], weight, 1e-6)[0], whole[row])


@pytest.mark.parametrize("size", SIZES)
def test_layer_norm_matches_float64(implementation, size):
    weight, bias = torch.randn(size), torch.randn(size)
    for rows in ROWS:
        x, residual = torch.randn(rows, size) + 30.0, torch.randn(rows, size)
        summed = residual + x

        plain = kernels.layer_norm(x, weight, None, 1e-5)
        fused = kernels.layer_norm(x, weight, bias, 1e-5, residual)

        for got, source, shift in ((plain, x, 0.0), (fused, summed, bias.double())):
            wide = source.double()
            centred = wide - wide.mean(-1, keepdim=True)
            scale = (centred.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
            want = centred * scale * weight.double() + shift
            # The mean of values around 30 is known to some units in the last place of 30, in steps of what the values differ by.
            unit = 30.0 * RELATIVE * scale * weight.abs() + RELATIVE * want.abs() + RELATIVE
            assert ((got - want).abs() <= unit).all()
        assert torch.equal(residual, summed)


def test_a_layer_normalised_row_does_not_depend_on_its_batch(implementation):
    wide, weight = torch.randn(100, 700), torch.randn(577)
    x = wide[:, 50:627]
    whole = kernels.layer_norm(x, weight, weight, 1e-6)
    for row in (0, 1, 50, 99):
        assert torch.equal(kernels.layer_norm(x[row : row + 1], weight, weight, 1e-6)[0], whole[row])


@pytest.mark.parametrize("rotary_dim", [2, 20, 32, 40, 80, 96])
def test_rotary_turns_halves_and_leaves_the_rest(implementation, rotary_dim):
    half = rotary_dim // 2
    angles = torch.arange(300)[:, None] * 1e4 ** -(torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    for tokens in (0, 1, 7, 70):
        qkv = torch.randn(tokens, 6 * 96)
        before = qkv.clone()
        q, k = qkv[:, : 4 * 96].view(tokens, 4, 96), qkv[:, 4 * 96 : 5 * 96].view(tokens, 1, 96)
        positions = torch.randint(0, 300, (tokens,), dtype=torch.int32)

        kernels.rotary(q, k, positions, cos, sin)

        heads, old = qkv.view(tokens, 6, 96).double(), before.view(tokens, 6, 96).double()
        c, s = cos[positions.long()].double()[:, None], sin[positions.long()].double()[:, None]
        a, b = old[:, :5, :half], old[:, :5, half:rotary_dim]
        assert torch.allclose(heads[:, :5, :half], a * c - b * s, atol=1e-6)
        assert torch.allclose(heads[:, :5, half:rotary_dim], b * c + a * s, atol=1e-6)
        assert torch.equal(heads[:, :5, rotary_dim:], old[:, :5, rotary_dim:])
        assert torch.equal(heads[:, 5], old[:, 5])


def test_native_rotary_refuses_positions_beyond_the_table(native):
    q, k, table = torch.randn(2, 2, 64), torch.randn(2, 1, 64), torch.randn(10, 32)
    with pytest.raises(ValueError, match="position 10"):
        kernels.rotary(q, k, torch.tensor([3, 10], dtype=torch.int32), table, table)
    with pytest.raises(ValueError, match="head_dim"):
        kernels.rotary(q, k, torch.tensor([3, 4], dtype=torch.int32), torch.randn(9, 33), torch.randn(9, 33))


def gelu(x):
    return torch.nn.functional.gelu(x)


def gelu_tanh(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


GATES = {"silu_mul": torch.nn.functional.silu, "gelu_tanh_mul": gelu_tanh, "gelu_mul": gelu}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("size", [1, 15, 16, 100, 1024, 1536, 2049])
def test_gated_activations_match_float64(implementation, name, size):
    activation = GATES[name]
    for rows in ROWS:
        x = torch.randn(rows, 2 * size) * 3

        got = getattr(kernels, name)(x)

        want = activation(x[:, :size].double()) * x[:, size:].double()
        # torch forms 1 + tanh, which cancels for negative x: an error of |gate| * |up| / 2^24, both up to 15 here.
        atol = 1.5e-5 if implementation == "torch" else 1e-7
        assert torch.allclose(got.double(), want, rtol=3e-6, atol=atol)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 15, 16, 100, 1024, 2049])
def test_activations_match_float64(implementation, name, size):
    for rows in ROWS:
        wide = torch.randn(rows, size + 3) * 3
        x = wide[:, 2 : size + 2]

        got = getattr(kernels, name)(x)

        want = (gelu if name == "gelu" else gelu_tanh)(x.double())
        # torch forms 1 + erf and 1 + tanh, which cancel for negative x.
        atol = 1.5e-6 if implementation == "torch" else 1e-7
        assert got.shape == x.shape
        assert torch.allclose(got.double(), want, rtol=3e-6, atol=atol)


def test_gelu_is_exact_to_some_units_in_the_last_place(native):
    x = torch.linspace(-6, 12, 200_001).view(1, -1)

    got = kernels.gelu(x)[0].double()

    # By the complement of erf: nothing cancels.
    want = x[0].double() * torch.special.erfc(-x[0].double() / 2**0.5) / 2
    error = ((got - want) / want).abs()
    assert error[x[0] > 0].max() <= 2**-22
    assert error[(x[0] < 0) & (x[0] > -3)].max() <= 2**-19
    assert error[(x[0] <= -3) & (x[0] > -6)].max() <= 2**-17


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_activations_hold_at_the_ends_of_the_range(implementation, name):
    x = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 1e4, torch.nan]])
    got = getattr(kernels, name)(x)[0]
    assert torch.equal(got[:3].abs() <= 1e-30, torch.ones(3, dtype=torch.bool))
    assert torch.equal(got[3:6], x[0, 3:6])
    assert got[6].isnan()


def test_gelu_of_infinity_is_a_number(native):
    assert torch.equal(kernels.gelu(torch.tensor([[-torch.inf, torch.inf]])), torch.tensor([[0.0, torch.inf]]))


@pytest.mark.parametrize("name", GATES)
def test_gated_activations_hold_at_the_ends_of_the_range(implementation, name):
    x = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4, torch.nan] + [1.0] * 8])
    got = getattr(kernels, name)(x)[0]
    assert torch.allclose(got[:7], torch.tensor([0.0, 0.0, 0.0, 0.0, 90.0, 200.0, 1e4]), atol=1e-30)
    assert got[7].isnan()


@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_embedding_looks_up_and_scales(implementation, table_dtype, ids_dtype):
    table = torch.randn(50, 77).to(table_dtype)
    for tokens in ROWS:
        ids = torch.randint(0, 50, (tokens,), dtype=ids_dtype)
        assert torch.equal(kernels.embedding(ids, table), table[ids.long()].float())
        assert torch.equal(kernels.embedding(ids, table, 8.5), table[ids.long()].float() * 8.5)


@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_embedding_reads_a_packed_weight(implementation, table_dtype, ids_dtype):
    table = torch.randn(77, 45).to(table_dtype)
    packed = kernels.pack_linear(table)
    for tokens in ROWS:
        ids = torch.randint(0, 77, (tokens,), dtype=ids_dtype)
        assert torch.equal(kernels.embedding(ids, packed, 8.5), table[ids.long()].float() * 8.5)
    with pytest.raises(ValueError, match="not in"):
        kernels.embedding(torch.tensor([77], dtype=ids_dtype), packed)


@pytest.mark.parametrize("bad", [-1, 50])
def test_an_id_outside_the_table_is_refused(implementation, bad):
    with pytest.raises(ValueError, match="not in"):
        kernels.embedding(torch.tensor([3, bad]), torch.randn(50, 16))


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 49152])
def test_argmax_takes_the_lowest_of_the_largest(implementation, size):
    for rows in (0, 1, 3, 20):
        x = torch.randint(-5, 5, (rows, size)).float()
        got = kernels.argmax(x)
        assert got.dtype == torch.int64
        for row in range(rows):
            assert got[row] == (x[row] == x[row].max()).nonzero()[0, 0]


def test_argmax_gives_minus_one_for_rows_with_a_nan(implementation):
    x = torch.randn(5, 100)
    x[1, 0] = x[2, 50] = x[3, 99] = torch.nan
    x[0, 20] = torch.inf
    x[4] = -torch.inf
    assert kernels.argmax(x).tolist() == [20, -1, -1, -1, 0]


def test_argmax_reads_rows_of_a_wider_tensor(implementation):
    wide = torch.randn(6, 300)
    assert torch.equal(kernels.argmax(wide[:, 100:201]), kernels.argmax(wide[:, 100:201].contiguous()))


def test_thread_counts_and_wide_instruction_sets_give_equal_bits(native):
    x, weight, residual = torch.randn(300, 1001), torch.randn(1001), torch.randn(300, 1001)
    gate = torch.randn(300, 3000)
    results = []
    for isa in [isa for isa, reason in cpu.isas() if not reason and isa != "baseline"]:
        cpu.select_isa(isa)
        for threads in (1, 2, 5):
            kernels.set_num_threads(threads)
            norm = kernels.rms_norm(x, weight, 1e-5, residual.clone())
            results.append(
                (norm, *(getattr(kernels, name)(gate) for name in (*GATES, "gelu", "gelu_tanh")), kernels.argmax(x))
            )
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_sizes_that_do_not_fit_are_refused(native):
    with pytest.raises(ValueError, match="rms_norm"):
        kernels.rms_norm(torch.randn(3, 16), torch.randn(17), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        kernels.rms_norm(torch.randn(3, 16), torch.randn(16), 1e-5, torch.randn(4, 16))
    with pytest.raises(ValueError, match=r"2 \* size"):
        kernels.silu_mul(torch.randn(3, 5))
    with pytest.raises(ValueError, match="argmax"):
        kernels.argmax(torch.randn(3, 0))
    with pytest.raises(ValueError, match="embedding"):
        kernels.embedding(torch.tensor([1.0]), torch.randn(5, 16))
