"""int4: 4 bits, a scale and a minimum for 32 weights of a row; the grid of GGUF's Q4_1. Runs in the thread that loads the model."""

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP

# Shares of a group's range that are tried; a narrower grid clips the extremes and is finer for the rest.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)


def quantize(weight: torch.Tensor) -> QuantizedMatrix:
    """float32[n, k] to nearest, on the grid of each group that `grid` finds."""
    n, k = weight.shape
    groups = -(-k // KERNEL_GROUP)
    padded = torch.nn.functional.pad(weight, (0, groups * KERNEL_GROUP - k)).reshape(n, groups, KERNEL_GROUP)
    scales, minimums = grid(padded)
    codes = encode(padded, scales[..., None], minimums[..., None])
    return QuantizedMatrix("int4", codes.to(torch.uint8).reshape(n, -1)[:, :k], scales, minimums, KERNEL_GROUP)


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
