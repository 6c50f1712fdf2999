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
    """read_bytes_per_s: from memory, in order. fma_flops_per_s: float32 multiply-adds, two operations each."""

    read_bytes_per_s: float
    fma_flops_per_s: float

    def best(self, other: "MachineLimits") -> "MachineLimits":
        """The higher of two measurements: what else runs on a machine can only lower them."""
        return MachineLimits(
            max(self.read_bytes_per_s, other.read_bytes_per_s), max(self.fma_flops_per_s, other.fma_flops_per_s)
        )

    def shortest_s(self, num_bytes: float, flops: float) -> float:
        """No step that reads so much and computes so much can be shorter."""
        return max(num_bytes / self.read_bytes_per_s, flops / self.fma_flops_per_s)


def machine_limits(repeat: int = 5) -> MachineLimits:
    """The best of `repeat` measurements of each. ConfigError when the native kernels do not load."""
    native = cpu.load()
    if native is None:
        raise ConfigError(f"the limits of the machine are measured by native code: {cpu.why_not()}")
    memory = torch.ones(_READ_BYTES // 4)
    flops = 0.0

    def compute() -> None:
        nonlocal flops
        flops = native.probe_fma(_FMA_ROUNDS)

    read_s = _best(lambda: native.probe_read(memory.data_ptr(), _READ_BYTES), repeat)
    fma_s = _best(compute, repeat)
    return MachineLimits(_READ_BYTES / read_s, flops / fma_s)


def _best(run: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)
