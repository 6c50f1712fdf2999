"""The grid of int4, and rounding to it with error feedback: a column's rounding error is made good, as far as inputs allow, by the columns after it.

Source: E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022), algorithm 1, with
the columns in the order of their inputs' size; grids are those of the weights before correction, so the order leaves no trace in the
file. Runs in the thread that quantises a checkpoint.
"""

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP

# Shares of a group's range that are tried; a narrower grid clips the extremes and is finer for the rest.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)


def grid(groups: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, minimums) float32[...] of groups float32[..., size]: of some widths around the middle, the one with least squared error. importance:
    broadcasts to groups; weights of the squared errors."""
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


_DAMPING = 0.01  # of the mean of the diagonal, added to it
_BLOCK = 4 * KERNEL_GROUP  # columns whose corrections of the rest are applied in one product


def quantize(weight: torch.Tensor, hessian: torch.Tensor) -> QuantizedMatrix:
    """float32[n, k] on the grid of int4; k is a multiple of 32. hessian: float32[k, k], the sum of x x^T over inputs x of the layer. Inputs that
    were never seen leave their weights rounded to nearest."""
    n, k = weight.shape
    assert k % KERNEL_GROUP == 0, k
    importance = hessian.diagonal().clamp(min=1e-12)
    groups = weight.reshape(n, -1, KERNEL_GROUP)
    scales, minimums = grid(groups, importance.reshape(-1, KERNEL_GROUP))
    # Columns with the largest inputs first: what is left over at the end has nowhere to go.
    order = torch.argsort(importance, descending=True)
    feedback = _feedback(hessian[order][:, order])
    column_scales = scales.T.repeat_interleave(KERNEL_GROUP, dim=0)[order]
    column_minimums = minimums.T.repeat_interleave(KERNEL_GROUP, dim=0)[order]
    rest = weight.T[order].contiguous()  # [k, n]: a column of the weight is contiguous
    codes = torch.empty(k, n, dtype=torch.uint8)
    for begin in range(0, k, _BLOCK):
        end = min(begin + _BLOCK, k)
        errors = torch.empty(end - begin, n)
        for column in range(begin, end):
            code = encode(rest[column], column_scales[column], column_minimums[column])
            codes[column] = code
            rounded = code * column_scales[column] - column_minimums[column]
            errors[column - begin] = (rest[column] - rounded) / feedback[column, column]
            rest[column + 1 : end].addr_(feedback[column, column + 1 : end], errors[column - begin], alpha=-1.0)
        rest[end:].addmm_(feedback[begin:end, end:].T, errors, alpha=-1.0)
    unsorted = torch.empty_like(codes)
    unsorted[order] = codes
    return QuantizedMatrix("int4", unsorted.T.contiguous(), scales, minimums, KERNEL_GROUP)


def _feedback(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian, float32[k, k]."""
    damped = hessian.double()
    diagonal = damped.diagonal()
    # A dead input has a zero row: its damping alone keeps the matrix regular.
    diagonal.add_(_DAMPING * diagonal.mean().clamp(min=1e-12))
    lower = torch.linalg.cholesky(damped)
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()
