"""Token masks on packed bits, bit for bit against numpy."""

import numpy as np
import pytest
import torch

from headrace import kernels
from headrace.kernels import cpu


def random_masks(count: int, size: int) -> torch.Tensor:
    """int32[count, words]: words without any bit, with all of them and with random ones, beyond `size` too."""
    shape = (count, -(-size // 32))
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)
    kind = torch.randint(0, 3, shape)
    return torch.where(kind == 0, 0, torch.where(kind == 1, -1, words)).to(torch.int32)


def reference(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> np.ndarray:
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    return np.where(bits == 1, logits.numpy()[rows.numpy()], np.float32(-np.inf))


def same_bits(got: torch.Tensor, want: np.ndarray) -> bool:
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    return np.array_equal(got.numpy().view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 95, 577, 1000, 49152])
def test_a_mask_keeps_its_bits_and_forbids_the_rest(implementation, size):
    logits = torch.randn(7, 2 * size + 3)[:, 3 : 3 + size]
    before = logits.clone()
    for count in (0, 1, 3, 20):
        rows, masks = torch.randint(0, 7, (count,)), random_masks(count, size)

        got = kernels.mask_logits(logits, rows, masks)

        assert got.is_contiguous()
        assert same_bits(got, reference(logits, rows, masks))
    assert torch.equal(logits, before)


def test_masks_of_one_kind(implementation):
    logits = torch.randn(4, 100)
    rows = torch.tensor([2, 2, 0])
    none, every = torch.zeros(3, 4, dtype=torch.int32), torch.full((3, 4), -1, dtype=torch.int32)
    assert (kernels.mask_logits(logits, rows, none) == -torch.inf).all()
    assert torch.equal(kernels.mask_logits(logits, rows, every), logits[rows])
    for token in (0, 31, 32, 63, 64, 99):
        single = none.clone()
        single[:, token // 32] = torch.tensor(1 << token % 32).to(torch.int32)
        allowed = kernels.mask_logits(logits, rows, single) != -torch.inf
        assert allowed.nonzero()[:, 1].tolist() == [token] * 3


def test_nan_infinities_and_signs_of_zero_are_kept_where_allowed(implementation):
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -3.0])
    logits = special.repeat(2, 40)
    # A NaN with a payload of its own.
    logits.view(torch.int32)[:, ::49] = 0x7FC12345
    rows, masks = torch.tensor([1, 0, 1]), random_masks(3, 280)
    masks[2] = -1

    got = kernels.mask_logits(logits, rows, masks)

    assert same_bits(got, reference(logits, rows, masks))
    assert got[2].isnan().sum() == 40


def test_the_result_goes_into_out(implementation):
    logits, wide = torch.randn(5, 90), torch.full((3, 200), 7.0)
    rows, masks = torch.tensor([4, 1, 4]), random_masks(3, 90)
    out = wide[:, 50:140]

    assert kernels.mask_logits(logits, rows, masks, out).data_ptr() == out.data_ptr()

    assert same_bits(out.contiguous(), reference(logits, rows, masks))
    assert (wide[:, :50] == 7.0).all()
    assert (wide[:, 140:] == 7.0).all()


def test_thread_counts_and_instruction_sets_give_equal_bits(native):
    logits, rows, masks = torch.randn(50, 2001), torch.randint(0, 50, (40,)), random_masks(40, 2001)
    want = reference(logits, rows, masks)
    for isa in [isa for isa, reason in cpu.isas() if not reason]:
        cpu.select_isa(isa)
        for threads in (1, 2, 5):
            kernels.set_num_threads(threads)
            assert same_bits(kernels.mask_logits(logits, rows, masks), want)


@pytest.mark.parametrize("bad", [-1, 3])
def test_a_row_that_is_not_there_is_refused(implementation, bad):
    out = torch.zeros(2, 40)
    with pytest.raises(ValueError, match=r"mask_logits: row .* not in \[0, 3\)"):
        kernels.mask_logits(torch.randn(3, 40), torch.tensor([0, bad]), random_masks(2, 40), out)
    assert (out == 0.0).all()


def test_tensors_that_do_not_fit_are_refused(implementation):
    logits, rows, masks = torch.randn(3, 40), torch.tensor([0, 2]), random_masks(2, 40)
    with pytest.raises(ValueError, match="logits must be"):
        kernels.mask_logits(logits.double(), rows, masks)
    with pytest.raises(ValueError, match="logits must be"):
        kernels.mask_logits(logits[0], rows, masks)
    with pytest.raises(ValueError, match="rows must be"):
        kernels.mask_logits(logits, rows.int(), masks)
    with pytest.raises(ValueError, match="rows must be"):
        kernels.mask_logits(logits, torch.arange(4)[::2], masks)
    for wrong in (masks[:1], masks[:, :1].contiguous(), masks.long(), random_masks(2, 80)[:, ::2]):
        with pytest.raises(ValueError, match="masks must be"):
            kernels.mask_logits(logits, rows, wrong)
    for out in (torch.empty(3, 40), torch.empty(2, 41), torch.empty(2, 40).double()):
        with pytest.raises(ValueError, match="out must be"):
            kernels.mask_logits(logits, rows, masks, out)


def test_rows_with_gaps_between_their_elements_are_refused(native):
    rows, masks = torch.tensor([0, 2]), random_masks(2, 40)
    with pytest.raises(ValueError, match=r"logits must be .* contiguous rows"):
        kernels.mask_logits(torch.randn(3, 80)[:, ::2], rows, masks)
    with pytest.raises(ValueError, match=r"out must be .* contiguous rows"):
        kernels.mask_logits(torch.randn(3, 40), rows, masks, torch.empty(2, 80)[:, ::2])
