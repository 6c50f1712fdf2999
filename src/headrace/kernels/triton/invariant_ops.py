"""Batch-invariant forms of the ops whose fastest form on a GPU is not; the registry looks for them here."""

from headrace.kernels.triton.matmul import invariant_linear as linear
from headrace.kernels.triton.matmul import invariant_moe as moe

__all__ = ["linear", "moe"]
