"""Which function measures which piece. Runs in the process of one piece; a module that cannot be imported fails its own pieces only."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench.gpu.bench import SMALL, Bench, Rows, Sizes
from bench.gpu.options import Options

MEASURES: dict[str, tuple[str, str]] = {
    "device": ("rates", "device_facts"),
    "kernels": ("kernels", "check_kernels"),
    "rates": ("rates", "measure_rates"),
    "shapes": ("shapes", "measure_shapes"),
    "decode": ("steps", "measure_decode"),
    "prefill": ("steps", "measure_prefill"),
    "serving": ("serving", "measure_serving"),
    "server": ("server", "measure_server"),
    "tokens": ("equality", "compare_tokens"),
    "quantized": ("steps", "measure_quantized"),
    "deterministic": ("steps", "measure_deterministic"),
    "speculation": ("equality", "measure_speculation"),
    "experts": ("steps", "measure_experts"),
    "offline": ("serving", "measure_offline"),
    "transformers": ("against_transformers", "measure_transformers"),
    "features": ("features", "try_features"),
}
"""Module here, and the function of it, by piece."""


def run(name: str, options: Options, earlier: dict[str, Any], rows: Rows, out: Path) -> None:
    """Piece `name`. earlier: the pieces that ran before, by name. out: a folder for profiles."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU here")
    module, function = MEASURES[name]
    bench = Bench(options, SMALL if options.tiny else Sizes(), earlier, out)
    getattr(import_module(f"bench.gpu.{module}"), function)(bench, rows)
