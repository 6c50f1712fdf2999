"""Token masks in Triton: the bits of the torch implementation."""

import pytest
import torch

from headrace.kernels import drawing


@pytest.fixture
def token_mask(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch):
    from headrace.kernels.triton import sampling

    # Several blocks in a row, without logits by the hundred thousand.
    monkeypatch.setattr(sampling, "_MASK_BLOCK_WORDS", 4)
    return sampling


@pytest.mark.parametrize("size", [1, 31, 32, 33, 300, 1000])
@pytest.mark.parametrize("count", [1, 6])
def test_masked_rows_are_those_of_torch(token_mask, triton_device: torch.device, size: int, count: int):
    logits = torch.randn(4, 2 * size)[:, :size]
    logits[1, size // 2] = torch.nan
    logits[2, -1] = torch.inf
    mask_rows = torch.randint(-1, count, (4,))
    masks = torch.randint(-(2**31), 2**31, (count, -(-size // 32))).to(torch.int32)
    masks[::2, ::2] = 0
    masks[1::2, ::3] = -1
    on_device = logits.to(triton_device)

    got = token_mask.masked(on_device, masks.to(triton_device), mask_rows.to(triton_device))

    want = drawing.masked(logits, masks, mask_rows)
    torch.testing.assert_close(got.cpu(), want, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(on_device.cpu(), logits, atol=0, rtol=0, equal_nan=True)


def test_masks_on_the_host(token_mask, triton_device: torch.device):
    logits, mask_rows = torch.randn(4, 200), torch.tensor([2, -1, 2, 1])
    masks = torch.randint(-(2**31), 2**31, (3, 7)).to(torch.int32)
    got = token_mask.masked(logits.to(triton_device), masks, mask_rows)
    assert torch.equal(got.cpu(), drawing.masked(logits, masks, mask_rows))
    assert torch.equal(got[1].cpu(), logits[1])
    assert got[0].isinf().any()
    nothing = token_mask.masked(logits[:0].to(triton_device), masks, mask_rows[:0])
    assert nothing.shape == (0, 200)


def test_a_mask_that_is_not_there_and_rows_with_gaps_are_refused(token_mask, triton_device: torch.device):
    logits = torch.zeros(2, 64, device=triton_device)
    mask_rows, masks = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="contiguous"):
        token_mask.masked(logits[:, ::2], masks, mask_rows)
    with pytest.raises(ValueError, match=r"not in \[-1, 1\)"):
        token_mask.masked(logits, torch.zeros(1, 2, dtype=torch.int32), mask_rows + 1)
