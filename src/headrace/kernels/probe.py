"""What this machine can do at best, by its own measure: bytes read and multiply-adds a second, with the threads of the kernels.

For benchmarks. Runs in the thread that measures.
"""

import timeit
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial

import torch

from headrace.errors import ConfigError
from headrace.kernels import cpu

_READ_BYTES = 256 << 20
_FMA_ROUNDS = 1 << 20


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """read_bytes_per_s: from memory, in order. fma_flops_per_s: float32 multiply-adds, two operations each. dot_ops_per_s, word_ops_per_s,
    bf16_ops_per_s: the same of bytes, of 16-bit words and of bfloat16, as the linear layers that round their input compute them."""

    read_bytes_per_s: float
    fma_flops_per_s: float
    dot_ops_per_s: float
    word_ops_per_s: float
    bf16_ops_per_s: float

    def best(self, other: "MachineLimits") -> "MachineLimits":
        """The higher of two measurements: what else runs on a machine can only lower them."""
        return MachineLimits(*map(max, astuple(self), astuple(other)))

    def shortest_s(
        self, num_bytes: float, flops: float = 0.0, dot_ops: float = 0.0, word_ops: float = 0.0, bf16_ops: float = 0.0
    ) -> float:
        """No step that reads so much and computes so much, in floats, in bytes, in words and in bfloat16, can be shorter."""
        rounded_s = dot_ops / self.dot_ops_per_s + word_ops / self.word_ops_per_s + bf16_ops / self.bf16_ops_per_s
        return max(num_bytes / self.read_bytes_per_s, flops / self.fma_flops_per_s + rounded_s)


def machine_limits() -> MachineLimits:
    """The best of five measurements of each. ConfigError when the native kernels do not load."""
    native = cpu.load()
    if native is None:
        raise ConfigError(f"measuring the machine's limits needs the native kernels: {cpu.why_not()}")
    memory = torch.ones(_READ_BYTES // 4)
    # By DotKind of csrc/cpu/ops.h: bytes, words, bfloat16. Without instructions for the last, its products are slow.
    dot_rounds = (_FMA_ROUNDS, _FMA_ROUNDS, _FMA_ROUNDS if cpu.multiplies_bf16() else _FMA_ROUNDS // 64)

    def ops_per_s(multiply: Callable[[], float]) -> float:
        return multiply() / _best(multiply)

    return MachineLimits(
        _READ_BYTES / _best(lambda: native.probe_read(memory.data_ptr(), _READ_BYTES)),
        ops_per_s(lambda: native.probe_fma(_FMA_ROUNDS)),
        *(ops_per_s(partial(native.probe_dot, rounds, kind)) for kind, rounds in enumerate(dot_rounds)),
    )


def _best(run: Callable[[], object]) -> float:
    return min(timeit.repeat(run, repeat=5, number=1))
