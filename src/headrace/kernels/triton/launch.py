"""Launches that overlap: a kernel begins while the one before it ends, and waits for its results itself.

CUDA calls it programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"); from Hopper on. A step
of one sequence is some 300 short kernels, each of which would otherwise begin only when the one before has ended. A kernel that is launched so calls
`wait_for_previous` before it touches what others have written or read.
"""

from functools import cache

import torch
import triton
import triton.language as tl

_CAPABILITY = (9, 0)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


def is_hopper(x: torch.Tensor) -> bool:
    """Whether x is on a Hopper GPU or a later one."""
    return x.is_cuda and _is_hopper(x.device)


def overlaps(x: torch.Tensor) -> bool:
    """Whether kernels on the device of x are launched so; both the option `launch_pdl` and the constant OVERLAPS of a kernel."""
    return is_hopper(x)


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Wait until the kernels before are done; and let the next one begin when all programs of this one have."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
