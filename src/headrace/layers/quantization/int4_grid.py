"""The grid of int4: which scale and minimum a group of weights gets, and which codes. Runs in the thread that quantises."""

import torch

# Shares of a group's range that are tried; a narrower grid clips the extremes and is finer for the rest.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)


def grid(groups: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, minimums) float32[...] of groups float32[..., size]: of some widths around the middle, the one with least squared error.

    importance: broadcasts to groups; weights of the squared errors.
    """
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    middle, half = (high + low) / 2, (high - low) / 2
    best_error = torch.full_like(low, torch.inf)
    best_scales, best_minimums = torch.zeros_like(low), torch.zeros_like(low)
    for shrink in _SHRINKS:
        scales = 2 * shrink * half / 15
        minimums = shrink * half - middle
        codes = encode(groups, scales[..., None], minimums[..., None])
        errors = codes.mul_(scales[..., None]).sub_(minimums[..., None]).sub_(groups).square_()
        error = (errors if importance is None else errors * importance).sum(dim=-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scales = torch.where(better, scales, best_scales)
        best_minimums = torch.where(better, minimums, best_minimums)
    return best_scales, best_minimums


def encode(values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    """The nearest codes 0 .. 15, as float32; scales and minimums broadcast to values."""
    return ((values + minimums) / scales.clamp(min=1e-30)).round_().clamp_(0, 15)
