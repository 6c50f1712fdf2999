"""Token masks in Triton: the bits of the torch implementation."""

import pytest
import torch

from headrace.kernels import torch_fallback


@pytest.fixture
def token_mask(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch):
    from headrace.kernels.triton import token_mask

    # Several blocks in a row, without logits by the hundred thousand.
    monkeypatch.setattr(token_mask, "_BLOCK_WORDS", 4)
    return token_mask


@pytest.mark.parametrize("size", [1, 31, 32, 33, 300, 1000])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_masked_rows_are_those_of_torch(token_mask, triton_device: torch.device, size: int, count: int):
    logits = torch.randn(4, 2 * size)[:, :size]
    logits[1, size // 2] = torch.nan
    logits[2, -1] = torch.inf
    rows = torch.randint(0, 4, (count,))
    masks = torch.randint(-(2**31), 2**31, (count, -(-size // 32))).to(torch.int32)
    masks[::2, ::2] = 0
    masks[1::2, ::3] = -1
    on_device = logits.to(triton_device)

    got = token_mask.mask_logits(on_device, rows.to(triton_device), masks.to(triton_device), None)

    want = torch_fallback.mask_logits(logits, rows, masks, None)
    torch.testing.assert_close(got.cpu(), want, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(on_device.cpu(), logits, atol=0, rtol=0, equal_nan=True)


def test_rows_and_masks_on_the_host_and_out(token_mask, triton_device: torch.device):
    logits, rows = torch.randn(3, 200), torch.tensor([2, 0, 2, 1])
    masks = torch.randint(-(2**31), 2**31, (4, 7)).to(torch.int32)
    wide = torch.full((4, 300), 7.0, device=triton_device)
    out = wide[:, 60:260]

    got = token_mask.mask_logits(logits.to(triton_device), rows, masks, out)

    assert got is out
    assert torch.equal(out.cpu(), torch_fallback.mask_logits(logits, rows, masks, None))
    assert (wide[:, :60] == 7.0).all()
    assert (wide[:, 260:] == 7.0).all()


def test_rows_with_gaps_are_refused(token_mask, triton_device: torch.device):
    logits = torch.zeros(2, 64, device=triton_device)
    rows, masks = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="contiguous"):
        token_mask.mask_logits(logits[:, ::2], rows, masks, None)
