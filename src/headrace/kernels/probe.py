"""What this machine can do at best, by its own measure: bytes read and multiply-adds a second, with the threads of the kernels.

For benchmarks. Runs in the thread that measures.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.errors import ConfigError
from headrace.kernels import cpu

_READ_BYTES = 256 << 20
_FMA_ROUNDS = 1 << 20


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """read_bytes_per_s: from memory, in order. fma_flops_per_s: float32 multiply-adds, two operations each. dot_ops_per_s, word_ops_per_s:
    the same of bytes and of 16-bit words, as the quantised linears compute them."""

    read_bytes_per_s: float
    fma_flops_per_s: float
    dot_ops_per_s: float
    word_ops_per_s: float

    def best(self, other: "MachineLimits") -> "MachineLimits":
        """The higher of two measurements: what else runs on a machine can only lower them."""
        return MachineLimits(
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.fma_flops_per_s, other.fma_flops_per_s),
            max(self.dot_ops_per_s, other.dot_ops_per_s),
            max(self.word_ops_per_s, other.word_ops_per_s),
        )

    def shortest_s(self, num_bytes: float, flops: float = 0.0, dot_ops: float = 0.0, word_ops: float = 0.0) -> float:
        """No step that reads so much and computes so much, in floats, in bytes and in words, can be shorter."""
        integers_s = dot_ops / self.dot_ops_per_s + word_ops / self.word_ops_per_s
        return max(num_bytes / self.read_bytes_per_s, flops / self.fma_flops_per_s + integers_s)


def machine_limits(repeat: int = 5) -> MachineLimits:
    """The best of `repeat` measurements of each. ConfigError when the native kernels do not load."""
    native = cpu.load()
    if native is None:
        raise ConfigError(f"measuring the machine's limits needs the native kernels: {cpu.why_not()}")
    memory = torch.ones(_READ_BYTES // 4)
    flops = dot_ops = word_ops = 0.0

    def multiply_floats() -> None:
        nonlocal flops
        flops = native.probe_fma(_FMA_ROUNDS)

    def multiply_bytes() -> None:
        nonlocal dot_ops
        dot_ops = native.probe_dot(_FMA_ROUNDS, False)

    def multiply_words() -> None:
        nonlocal word_ops
        word_ops = native.probe_dot(_FMA_ROUNDS, True)

    read_s = _best(lambda: native.probe_read(memory.data_ptr(), _READ_BYTES), repeat)
    fma_s, dot_s = _best(multiply_floats, repeat), _best(multiply_bytes, repeat)
    word_s = _best(multiply_words, repeat)
    return MachineLimits(_READ_BYTES / read_s, flops / fma_s, dot_ops / dot_s, word_ops / word_s)


def _best(run: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)
