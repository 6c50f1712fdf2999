"""The ops of `headrace.kernels.ops` that Triton runs; the registry looks for them here. All others are left to torch."""

from headrace.kernels.triton.linear import linear
from headrace.kernels.triton.matmul import moe
from headrace.kernels.triton.routing import route
from headrace.kernels.triton.rows import gelu_tanh_mul, layer_norm, rms_norm, rotary, silu_mul
from headrace.kernels.triton.sampling import argmax, draw, exp_sums

__all__ = [
    "argmax",
    "draw",
    "exp_sums",
    "gelu_tanh_mul",
    "layer_norm",
    "linear",
    "moe",
    "rms_norm",
    "rotary",
    "route",
    "silu_mul",
]
