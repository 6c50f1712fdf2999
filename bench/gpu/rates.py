"""What the device is, and its best rates: copying memory, and multiplying matrices."""

import platform
from collections.abc import Callable
from functools import partial

import torch

from bench.gpu.bench import Bench, Rows
from headrace import kernels


def device_facts(bench: Bench, rows: Rows) -> None:
    """Names and versions."""
    rows.add("python", platform.python_version())
    rows.add("torch", str(torch.__version__))
    for module in ("triton", "transformers"):
        try:
            rows.add(module, str(__import__(module).__version__))
        except ImportError:
            rows.add(module, "not installed", ok=module != "triton" or not bench.on_gpu)
    if bench.on_gpu:
        facts = torch.cuda.get_device_properties(0)
        rows.add("device", facts.name)
        rows.add("compute capability", f"{facts.major}.{facts.minor}")
        rows.add("memory", f"{facts.total_memory / 2**30:.1f} GiB", bytes=facts.total_memory)
        rows.add("CUDA of torch", str(torch.version.cuda))
    for entry in kernels.report(bench.options.device):
        rows.add(f"op {entry.op} is run by", entry.implementation)


def measure_rates(bench: Bench, rows: Rows) -> None:
    """The best rates of this device: copying memory, and multiplying matrices."""
    sizes = bench.sizes
    source = torch.zeros(sizes.copy, dtype=torch.uint8, device=bench.device)
    seconds = _best(bench, partial(torch.empty_like(source).copy_, source))
    rate = 2 * sizes.copy / seconds
    rows.add("copy bandwidth", f"{rate / 1e9:.0f} GB/s, read and write", bytes_per_s=rate)
    size = (sizes.product, sizes.product)
    a, b = (torch.randn(size, device=bench.device).to(torch.bfloat16) for _ in range(2))
    seconds = _best(bench, lambda: torch.mm(a, b))
    rate = 2 * sizes.product**3 / seconds
    rows.add("bfloat16 products", f"{rate / 1e12:.1f} TFLOP/s", flops_per_s=rate)


def _best(bench: Bench, work: Callable[[], object], repeat: int = 20) -> float:
    work()
    return min(bench.clock.time(work) for _ in range(repeat))
