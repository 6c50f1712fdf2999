"""What the tests of this room share: engines, tensors, answers."""

from pathlib import Path
from typing import Any

import torch
from engines import running_engine
from safetensors.torch import load_file

from headrace.api.engine import Engine

PROMPTS = [[1, 5, 9, 1000, 77], list(range(20, 60)), [333, 4, 8]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_new_tokens": 300, "ignore_eos": True}


def engine_of(model: str, **options: Any):
    """A small engine of one process."""
    return running_engine(model, **{"num_threads": 1, "max_total_tokens": 2048, "dtype": "float32", **options})


def tokens(engine: Engine) -> list[list[int]]:
    """Greedy tokens of the prompts."""
    return [output["output_ids"] for output in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]


def fresh(model: str, **options: Any) -> list[list[int]]:
    """Greedy tokens of an engine that starts from `model`."""
    with engine_of(model, **options) as engine:
        return tokens(engine)


def tensors_of(folder: str | Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint."""
    return load_file(Path(folder) / "model.safetensors")
