"""How kernels are launched: their tiles; and launches that overlap: a kernel begins while the one before it ends, and waits for its results itself.

CUDA calls it programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"); from Hopper on. A step
of one sequence is some 300 short kernels, each of which would otherwise begin only when the one before has ended. A kernel that is launched so calls
`wait_for_previous` before it touches what others have written or read.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of the tiles of a product, and how it is compiled."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        blocks = {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.inner}
        return {**blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


def precision(x: torch.Tensor) -> str:
    """float32 products in full, not in TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


def is_hopper(x: torch.Tensor) -> bool:
    """Whether x is on a Hopper GPU or a later one."""
    return x.is_cuda and _is_hopper(x.device)


def overlapping(x: torch.Tensor) -> dict[str, bool]:
    """Options of a launch that overlaps, on devices that can: Triton's, and the constant of `wait_for_previous`."""
    return {"launch_pdl": is_hopper(x), "OVERLAPS": is_hopper(x)}


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Wait until the kernels before are done; and let the next one begin when all programs of this one have."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
