"""Norms, rotation and gated activations in Triton against torch's, in the shapes that models have."""

import pytest
import torch

from headrace.kernels import torch_fallback

# x / (1 + exp(-x)) of a very negative x: an infinity on the way to zero, of which numpy, under the interpreter, would warn.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

# float32: sums of up to 4096 squares in another order. float16: one rounding of the result.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.fixture
def ops(triton_device: torch.device):
    from headrace.kernels.triton import rows

    torch.set_default_device(triton_device)
    yield rows
    torch.set_default_device(None)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(0, 64), (1, 4096), (5, 576), (33, 80)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norms(ops, dtype: torch.dtype, rows: int, size: int, with_residual: bool):
    x = torch.randn(rows, 2 * size).to(dtype)[:, :size]
    weight, bias = torch.randn(size), torch.randn(size)
    for name, parameters in (
        ("rms_norm", (weight, 1e-5)),
        ("layer_norm", (weight, bias, 1e-5)),
        ("layer_norm", (weight, None, 1e-5)),
    ):
        residual = torch.randn(rows, size).to(dtype) if with_residual else None
        kept = None if residual is None else residual.clone()

        got = getattr(ops, name)(x, *parameters, residual)

        assert_close(got, getattr(torch_fallback, name)(x, *parameters, kept))
        if residual is not None:
            assert torch.equal(residual, kept)


def test_the_bits_of_a_norm_depend_on_its_row_alone(ops):
    x, weight = torch.randn(40, 96), torch.randn(96)
    together = ops.rms_norm(x, weight, 1e-6, None)

    assert all(torch.equal(ops.rms_norm(x[r : r + 1], weight, 1e-6, None)[0], together[r]) for r in range(0, 40, 7))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "half"),
    [(9, 3, 64, 32), (4, 4, 80, 40), (8, 1, 128, 32), (1, 1, 16, 8)],
)
def test_rotation_within_one_projection(
    ops, dtype: torch.dtype, num_q_heads: int, num_kv_heads: int, head_dim: int, half: int
):
    sizes = (num_q_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    joined = torch.randn(5, sum(sizes)).to(dtype)
    positions = torch.tensor([0, 3, 90, 1, 99], dtype=torch.int32)
    cos, sin = torch.randn(100, half), torch.randn(100, half)
    want = joined.clone()

    for rotary, qkv in ((ops.rotary, joined), (torch_fallback.rotary, want)):
        q, k, _ = qkv.split(sizes, dim=1)
        rotary(q.unflatten(1, (num_q_heads, head_dim)), k.unflatten(1, (num_kv_heads, head_dim)), positions, cos, sin)

    assert_close(joined, want)


def test_rotation_refuses_what_does_not_fit(ops):
    q = torch.zeros(1, 1, 16)
    positions, table = torch.zeros(1, dtype=torch.int32), torch.zeros(4, 16)
    with pytest.raises(ValueError, match="do not fit head_dim 16"):
        ops.rotary(q, q, positions, table, table)
    with pytest.raises(ValueError, match="side by side"):
        ops.rotary(torch.zeros(1, 16, 2).transpose(1, 2), q, positions, table[:, :8], table[:, :8])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (3, 7), (2, 1500)])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations(ops, dtype: torch.dtype, rows: int, size: int, name: str):
    x = (torch.randn(rows, 2 * size) * 4).to(dtype)

    assert_close(getattr(ops, name)(x), getattr(torch_fallback, name)(x))
    with pytest.raises(ValueError, match=name):
        getattr(ops, name)(x[:, 1:])
