"""Ids from logits in Triton: the same as `drawing` defines them, bit for bit."""

import pytest
import torch

from headrace.kernels import drawing, torch_fallback

PARAMETERS = [
    # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 3, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (0.5, 50, 0.5, 0.0),
    (1.0, 0, 1.0, 0.2),
    (2.0, 40, 0.95, 0.01),
    (1.0, 1, 0.1, 0.0),
    (0.0, 5, 0.5, 0.5),
    (-1.0, 0, 1.0, 0.0),
    (1e-30, 0, 0.9, 0.0),
    (1e30, 9, 1.0, 0.0),
]


@pytest.fixture
def sampling(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch):
    from headrace.kernels.triton import sampling

    # Several blocks in a row, without logits by the hundred thousand.
    monkeypatch.setattr(sampling, "_PEAK_BLOCK", 256)
    monkeypatch.setattr(sampling, "_DRAW_BLOCK", 512)
    return sampling


def columns(rows: int) -> list[torch.Tensor]:
    """Parameters of the rows, in another order each time, and a random number."""
    temperature, top_k, top_p, min_p = zip(*(PARAMETERS[i % len(PARAMETERS)] for i in range(rows)), strict=True)
    min_weights = (torch.tensor(min_p, dtype=torch.float64) * drawing.ONE).ceil().long()
    return [
        torch.tensor(temperature),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        min_weights,
        torch.rand(rows, dtype=torch.float64),
    ]


@pytest.mark.parametrize(("size", "has_ties"), [(1, False), (700, False), (700, True)])
def test_draws_are_those_of_the_definition(sampling, triton_device: torch.device, size: int, has_ties: bool):
    logits = torch.randn(len(PARAMETERS), size) * 3
    if has_ties:
        logits = (logits / 2).round() * 2
        logits[0] = 0.0
        logits[0, ::2] = -0.0
    parameters = columns(len(PARAMETERS))

    got = sampling.draw(logits.to(triton_device), *parameters)

    assert torch.equal(got.cpu(), drawing.draw(logits, *parameters))


def test_masked_and_broken_rows(sampling, triton_device: torch.device):
    logits = torch.randn(5, 300)
    logits[0, 1:] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 299] = torch.nan
    logits[3, 17] = torch.inf
    parameters = columns(5)

    got = sampling.draw(logits.to(triton_device), *parameters)

    assert got.tolist() == drawing.draw(logits, *parameters).tolist()
    assert got[:4].tolist() == [0, -1, -1, -1]
    assert got[4] >= 0


def test_ends_of_the_range_of_random_numbers(sampling, triton_device: torch.device):
    logits = torch.randn(4, 600)
    ones = torch.ones(4)
    u = torch.tensor([0.0, 1.0 - 2.0**-53, 0.5, 2.0**-53], dtype=torch.float64)
    parameters = (ones, torch.tensor([0, 0, 2, 600]), ones.double(), torch.zeros(4, dtype=torch.int64), u)

    assert torch.equal(sampling.draw(logits.to(triton_device), *parameters).cpu(), drawing.draw(logits, *parameters))


@pytest.mark.parametrize("size", [1, 300, 1000])
def test_argmax_and_exp_sums(sampling, triton_device: torch.device, size: int):
    x = (torch.randn(6, size) * 3).round()
    x[0] = -torch.inf
    x[1, size // 2] = torch.nan
    x[2, -1] = torch.inf
    on_device = x.to(triton_device)

    assert torch.equal(sampling.argmax(on_device).cpu(), torch_fallback.argmax(x))
    peaks, sums = sampling.exp_sums(on_device)
    want_peaks, want_sums = drawing.exp_sums(x)
    torch.testing.assert_close(peaks.cpu(), want_peaks, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(sums.cpu(), want_sums)


def test_no_rows_and_odd_logits(sampling, triton_device: torch.device):
    nothing = torch.empty(0, 9, device=triton_device)
    assert sampling.argmax(nothing).shape == (0,)
    assert sampling.draw(nothing, *(column[:0] for column in columns(1))).shape == (0,)
    with pytest.raises(ValueError, match="float32"):
        sampling.argmax(torch.zeros(2, 3, device=triton_device).half())
