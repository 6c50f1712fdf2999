"""How far the numbers of a device are from those of the CPU."""

import math
from collections.abc import Callable

import torch

BF16_ERROR = 0.02
"""Norm of the difference over that of the reference: bfloat16 keeps 8 bits, and sums round once more."""

Check = Callable[[], tuple[float, float]]
"""Gives the error and the largest one allowed."""


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal floats of the CPU's generator, so that every device is given the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over that of `want`; infinite where a value is not finite."""
    difference = got.float().cpu() - want.float().cpu()
    if not bool(difference.isfinite().all()):
        return math.inf
    return float(difference.norm() / want.float().norm())
