"""Which function measures which piece. Runs in the process of one piece."""

from collections.abc import Callable
from typing import Any

import torch

from headrace.benchmark.gpu.against_transformers import measure_transformers
from headrace.benchmark.gpu.bench import SMALL, Bench, Rows, Sizes
from headrace.benchmark.gpu.kernels import check_kernels
from headrace.benchmark.gpu.options import Options
from headrace.benchmark.gpu.rates import device_facts, measure_rates
from headrace.benchmark.gpu.serving import measure_serving
from headrace.benchmark.gpu.steps import measure_decode, measure_prefill

MEASURES: dict[str, Callable[[Bench, Rows], None]] = {
    "device": device_facts,
    "kernels": check_kernels,
    "rates": measure_rates,
    "decode": measure_decode,
    "prefill": measure_prefill,
    "serving": measure_serving,
    "transformers": measure_transformers,
}


def run(name: str, options: Options, earlier: dict[str, Any], rows: Rows) -> None:
    """Piece `name`; each row is there as soon as it is known. earlier: the pieces that ran before, by name."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU here")
    bench = Bench(options, SMALL if options.tiny else Sizes(), earlier)
    MEASURES[name](bench, rows)
