"""The ops whose fastest form on a GPU lets a row feel its neighbours, in a form that does not: where the registry looks for those."""

from headrace.kernels.triton.matmul import invariant_linear as linear
from headrace.kernels.triton.matmul import invariant_moe as moe

__all__ = ["linear", "moe"]
