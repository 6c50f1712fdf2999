"""Draws under token masks on packed bits: the ids of the same draw with -inf where a mask, read by numpy, has no bit."""

import numpy as np
import pytest
import torch

from headrace import kernels
from headrace.kernels import cpu
from headrace.kernels.drawing import ONE

SETTINGS = [
    # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 5, 1.0, 0.0),
    (1.0, 2000, 0.5, 0.0),
    (2.0, 0, 1.0, 0.05),
    (1e30, 0, 0.8, 0.0),
    (-1.0, 0, 1.0, 0.0),
]


def columns(rows: int) -> list[torch.Tensor]:
    """The parameters of `rows` rows, of all settings in turn, and a random number for each."""
    temperature, top_k, top_p, min_p = zip(*(SETTINGS[i % len(SETTINGS)] for i in range(rows)), strict=True)
    min_weights = (torch.tensor(min_p, dtype=torch.float64) * ONE).ceil().long()
    random = torch.rand(rows, dtype=torch.float64)
    return [torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p).double(), min_weights, random]


def random_masks(count: int, size: int) -> torch.Tensor:
    """int32[count, words]: words without any bit, with all of them and with random ones, beyond `size` too, and some long ways without any."""
    shape = (count, -(-size // 32))
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)
    kind = torch.randint(0, 3, shape)
    some = torch.where(kind == 0, 0, torch.where(kind == 1, -1, words))
    return torch.where(torch.randint(0, 2, (count, 1)).bool() & (torch.arange(shape[1]) % 48 < 40), 0, some).int()


def where_allowed(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> torch.Tensor:
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    every = np.ones((1, logits.shape[1]), np.uint8)
    return torch.from_numpy(
        np.where(np.concatenate((bits, every))[mask_rows.numpy()] == 1, logits.numpy(), np.float32(-np.inf))
    )


@pytest.mark.parametrize("size", [1, 31, 32, 33, 95, 512, 577, 1000, 5000, 49152])
def test_what_a_mask_forbids_is_as_if_it_were_not_there(implementation, size):
    rows = 2 * len(SETTINGS) + 1
    logits = (torch.randn(rows, 2 * size + 3) * 4)[:, 3 : 3 + size]
    logits[-3:] = logits[-3:].round()  # ties
    before, parameters = logits.clone(), columns(rows)
    for count in (1, 3, rows):
        masks, mask_rows = random_masks(count, size), torch.randint(-1, count, (rows,))

        got = kernels.draw(logits, *parameters, masks, mask_rows)

        assert got.tolist() == kernels.draw(where_allowed(logits, masks, mask_rows), *parameters).tolist()
    assert torch.equal(logits, before)


def test_masks_of_no_token_of_one_and_of_all(implementation):
    size, parameters = 1200, columns(3)
    parameters[0] = torch.tensor([0.0, 1.0, 1.0])
    logits = torch.randn(3, size)
    every = torch.full((1, 38), -1, dtype=torch.int32)
    mask_rows = torch.zeros(3, dtype=torch.int64)
    assert kernels.draw(logits, *parameters, every * 0, mask_rows).tolist() == [-1, -1, -1]
    assert torch.equal(kernels.draw(logits, *parameters, every, mask_rows), kernels.draw(logits, *parameters))
    for token in (0, 31, 32, 511, 512, 1023, 1024, size - 1):
        single = every * 0
        single[0, token // 32] = torch.tensor(1 << token % 32).to(torch.int32)
        assert kernels.draw(logits, *parameters, single, mask_rows).tolist() == [token] * 3
    beyond = every * 0
    beyond[0, -1] = torch.tensor(-1 << size % 32).to(torch.int32)
    assert kernels.draw(logits, *parameters, beyond, mask_rows).tolist() == [-1, -1, -1]


def test_nan_and_infinities_count_where_they_are_allowed(implementation):
    logits = torch.randn(7, 1100)
    parameters = columns(7)
    parameters[0] = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    masks = torch.zeros(2, 35, dtype=torch.int32)
    masks[0, 2], masks[1, 30] = 7, 1 << 5
    allowed, forbidden = 65, 68
    logits[0, allowed] = torch.nan
    logits[1, allowed] = torch.inf
    logits[2, 64:67] = -torch.inf
    logits[3, [forbidden, 900]] = torch.nan
    logits[4, [forbidden, 900]] = torch.inf
    logits[5] = torch.nan
    logits[5, 965] = -3.0
    logits[6] = -torch.inf
    logits[6, 64:67] = -3e38

    got = kernels.draw(logits, *parameters, masks, torch.tensor([0, 0, 0, 0, 0, 1, 0])).tolist()

    assert got[:3] == [-1, -1, -1]
    assert got[3] == 64 + logits[3, 64:67].argmax()
    assert got[4] in (64, 65, 66)
    assert got[5] == 965
    assert got[6] in (64, 65, 66)


def test_thread_counts_and_instruction_sets_give_equal_ids(native):
    logits, parameters = torch.randn(50, 2001) * 5, columns(50)
    masks, mask_rows = random_masks(20, 2001), torch.randint(-1, 20, (50,))
    with kernels.prefer("torch"):
        want = kernels.draw(logits, *parameters, masks, mask_rows)
    for isa in [isa for isa, reason in cpu.isas() if not reason]:
        cpu.select_isa(isa)
        for threads in (1, 2, 5):
            kernels.set_num_threads(threads)
            assert torch.equal(kernels.draw(logits, *parameters, masks, mask_rows), want)


@pytest.mark.parametrize("bad", [-2, 3])
def test_a_mask_that_is_not_there_is_refused(implementation, bad):
    with pytest.raises(ValueError, match=r"draw: mask .* not in \[-1, 3\)"):
        kernels.draw(torch.randn(2, 40), *columns(2), random_masks(3, 40), torch.tensor([0, bad]))


def test_masks_that_do_not_fit_are_refused(implementation):
    logits, mask_rows, masks = torch.randn(3, 40), torch.tensor([0, -1, 1]), random_masks(2, 40)
    parameters = columns(3)
    for wrong in (mask_rows.int(), mask_rows[:2], torch.arange(6)[::2]):
        with pytest.raises(ValueError, match="mask_rows must be"):
            kernels.draw(logits, *parameters, masks, wrong)
    for wrong in (masks[:, :1].contiguous(), masks.long(), random_masks(2, 80)[:, ::2]):
        with pytest.raises(ValueError, match="masks must be"):
            kernels.draw(logits, *parameters, wrong, mask_rows)
    with pytest.raises(ValueError, match="go together"):
        kernels.draw(logits, *parameters, masks)
