"""The routing of a mixture of experts in Triton, beside torch's."""

import pytest
import torch


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 8, 2), (5, 60, 4), (3, 128, 8), (2, 5, 5)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_the_best_experts_and_their_shares(triton_device, rows, experts, top_k, renormalise):
    from headrace.kernels import torch_fallback
    from headrace.kernels.triton.experts import route

    wide = torch.randn(rows, experts + 3, device=triton_device)

    shares, ids = route(wide[:, :experts], top_k, renormalise)

    want_shares, want_ids = torch_fallback.route(wide[:, :experts], top_k, renormalise)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(shares, want_shares, rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_first_is_chosen(triton_device):
    from headrace.kernels.triton.experts import route

    shares, ids = route(torch.zeros(2, 6, device=triton_device), 3, True)

    assert ids.tolist() == [[0, 1, 2]] * 2
    assert shares.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(("pairs", "experts"), [(1, 4), (8, 128), (64, 7), (150, 128), (3000, 16)])
def test_pairs_in_the_order_of_experts(triton_device, pairs, experts):
    from headrace.kernels.triton.experts import order_by_expert

    ids = torch.randint(-1, experts, (pairs,), device=triton_device)

    order, begins = order_by_expert(ids, experts)

    keys = torch.where(ids < 0, experts, ids)
    assert torch.equal(order, torch.argsort(keys, stable=True))
    assert begins.tolist() == [int((keys < expert).sum()) for expert in range(experts + 2)]
