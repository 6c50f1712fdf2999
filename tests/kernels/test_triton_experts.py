"""The grouped product of a mixture of experts, and the linear layer of batch-invariant mode, against torch's."""

import pytest
import torch

from headrace import kernels
from headrace.kernels import torch_fallback
from headrace.kernels.packing import PackedExperts, PackedLinear

# Sums of up to 130 products in another order.
TOLERANCE = 2e-5


def packed(n: int, k: int, device: torch.device, *, bias: bool = False) -> PackedLinear:
    weight = torch.randn(n, k, device=device) / k**0.5
    return PackedLinear(n, k, "torch", weight, torch.randn(n, device=device) if bias else None)


def a_mixture(count: int, hidden: int, inner: int, activation: str, device: torch.device, **options) -> PackedExperts:
    return kernels.pack_experts(
        [packed(2 * inner, hidden, device, **options) for _ in range(count)],
        [packed(hidden, inner, device, **options) for _ in range(count)],
        activation,
    )


def routed(rows: int, count: int, top_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(rows, count).argsort(dim=1)[:, :top_k]
    return ids.to(device), torch.rand(rows, top_k).to(device)


@pytest.mark.parametrize(
    ("rows", "count", "top_k", "hidden", "inner", "activation"),
    [
        (0, 4, 2, 64, 48, "silu"),
        (1, 4, 2, 64, 48, "silu"),
        (7, 8, 3, 96, 80, "gelu_tanh"),
        (70, 3, 2, 64, 33, "silu"),  # enough rows for the large tiles
    ],
)
def test_experts_give_what_one_after_the_other_gives(
    triton_device: torch.device, rows: int, count: int, top_k: int, hidden: int, inner: int, activation: str
):
    from headrace.kernels.triton import experts

    mixture = a_mixture(count, hidden, inner, activation, triton_device)
    x = torch.randn(rows, hidden, device=triton_device)
    ids, shares = routed(rows, count, top_k, triton_device)
    want = torch_fallback.moe(x, ids, shares, mixture)

    for moe in (experts.moe, experts.invariant_moe):
        torch.testing.assert_close(moe(x, ids, shares, mixture), want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("rows", [3, 70])
def test_experts_of_other_ranks_add_nothing(triton_device: torch.device, rows: int):
    """The whole mixture is the sum of its halves, in each of which the other's experts are -1."""
    from headrace.kernels.triton import experts

    count, top_k = 6, 3
    whole = a_mixture(count, 64, 48, "silu", triton_device)
    x = torch.randn(rows, 64, device=triton_device)
    ids, shares = routed(rows, count, top_k, triton_device)
    ids[0] = 0  # one row has nothing in the other half
    want = torch_fallback.moe(x, ids, shares, whole)

    for moe in (experts.moe, experts.invariant_moe):
        found = torch.zeros_like(want)
        for begin in (0, 3):
            part = kernels.pack_experts(whole.gate_up[begin : begin + 3], whole.down[begin : begin + 3], "silu")
            local = ids - begin
            local = local.masked_fill((local < 0) | (local >= 3), -1)
            found += moe(x, local, shares, part)
        torch.testing.assert_close(found, want, atol=TOLERANCE, rtol=TOLERANCE)


def test_experts_that_nobody_chose_are_not_read(triton_device: torch.device):
    from headrace.kernels.triton import experts

    mixture = a_mixture(5, 64, 32, "silu", triton_device)
    for unused in (0, 2, 4):
        mixture.gate_up[unused].data.fill_(torch.nan)
    x, ids = torch.randn(3, 64, device=triton_device), torch.tensor([[3, 1], [1, 3], [3, 1]], device=triton_device)

    assert experts.moe(x, ids, torch.rand(3, 2, device=triton_device), mixture).isfinite().all()


def test_experts_with_biases_are_left_to_torch(triton_device: torch.device):
    from headrace.kernels.triton import experts

    mixture = a_mixture(3, 64, 32, "silu", triton_device, bias=True)
    x = torch.randn(4, 64, device=triton_device)
    ids, shares = routed(4, 3, 1, triton_device)

    assert torch.equal(experts.moe(x, ids, shares, mixture), torch_fallback.moe(x, ids, shares, mixture))


def test_batch_invariant_bits_depend_on_the_row_alone(triton_device: torch.device, ordered_dots: None):
    from headrace.kernels.triton import experts, linear

    mixture, layer = a_mixture(3, 64, 32, "silu", triton_device), packed(100, 70, triton_device)
    x, ids = torch.randn(80, 70, device=triton_device), torch.randint(3, (80, 1), device=triton_device)
    shares = torch.rand(80, 1, device=triton_device)
    y = linear.invariant_linear(x, layer, None, False)
    mixed = experts.invariant_moe(x[:, :64].contiguous(), ids, shares, mixture)

    for row in (0, 13, 79):
        one = slice(row, row + 1)
        assert torch.equal(linear.invariant_linear(x[one], layer, None, False)[0], y[row])
        alone = experts.invariant_moe(x[one, :64].contiguous(), ids[one], shares[one], mixture)
        assert torch.equal(alone[0], mixed[row])


@pytest.mark.parametrize("bias", [False, True])
def test_the_batch_invariant_linear_layer(triton_device: torch.device, bias: bool):
    from headrace.kernels.triton import linear

    layer = packed(100, 130, triton_device, bias=bias)
    x = torch.randn(9, 260, device=triton_device)[:, :130]
    before = torch.randn(9, 120, device=triton_device)[:, :100]
    for accumulate in (False, True):
        want = torch_fallback.linear(x, layer, before.clone(), accumulate)
        got = linear.invariant_linear(x, layer, before.clone(), accumulate)
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(ValueError, match="accumulate needs out"):
        linear.invariant_linear(x, layer, None, True)
    with pytest.raises(ValueError, match="out must be"):
        linear.invariant_linear(x, layer, before[:, 1:], False)
