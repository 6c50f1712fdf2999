"""A small model on the device: its greedy tokens beside those of the CPU, and whether a step waits for the device."""

import json
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.bench import TINY, Bench
from bench.gpu.options import CONFIGS
from bench.gpu.plans import DRAWN, GREEDY, PENALISED, check_result, decode_plan, decode_plans, prompt_plan
from headrace import kernels
from headrace.checkpoint.model_config import load_model_config
from headrace.checkpoint.source import dummy_checkpoint
from headrace.config.server_args import ServerArgs
from headrace.execution.build import build_worker
from headrace.execution.load_weights import load_model
from headrace.layers.weight import Placement
from headrace.models.registry import model_class_for

_ROOM = 160
_SMALL = {**TINY, "head_dim": 64, "tie_word_embeddings": False}
_OPTIONS: dict[str, Any] = {
    "json_model_override_args": json.dumps(_SMALL),
    "max_running_requests": 3,
    "context_length": _ROOM,
    "max_total_tokens": 3 * _ROOM,
}


def token_check(bench: Bench) -> tuple[float, float]:
    """How many greedy tokens of a small model differ between graphs, eager steps and the CPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_small(folder)
        common = {"load_format": "auto", "model_path": name, "json_model_override_args": "{}", "dtype": "float32"}
        variants: list[dict[str, Any]] = [{"disable_cuda_graph": False}, {"disable_cuda_graph": True}]
        variants.append({"device": "cpu", "disable_native_kernels": True, "disable_overlap_schedule": True})
        got = [_greedy(bench.args("smollm2-135m", **{**_OPTIONS, **common, **variant})) for variant in variants]
    return float(sum(a != b for other in got[1:] for a, b in zip(got[0], other, strict=True))), 0.0


def wait_check(bench: Bench) -> tuple[float, float]:
    """Decode steps, by graphs and eagerly, greedy, drawn and with penalties, under torch's check for hidden waits, which raises."""
    for eagerly in (False, True):
        worker, _ = build_worker(bench.args("smollm2-135m", disable_cuda_graph=eagerly, **_OPTIONS))
        for sampling in (GREEDY, DRAWN, PENALISED):
            plans = decode_plans(3, 40, 100, _ROOM, sampling)
            for _ in range(3):
                worker.submit(next(plans))
                check_result(worker.collect())
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(2):
                    worker.submit(next(plans))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            for _ in range(2):
                check_result(worker.collect())
        worker.close()
    return 0.0, 0.0


def save_small(folder: Path) -> None:
    """A small llama with random weights of the CPU's generator, as a checkpoint."""
    from safetensors.torch import save_file

    raw = json.loads((CONFIGS / "smollm2-135m" / "config.json").read_text())
    raw |= {**_SMALL, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_model_config(folder)
    spec = model_class_for(config)
    placement = Placement(torch.device("cpu"), torch.float32, _ROOM)
    checkpoint = dummy_checkpoint(folder)
    with kernels.prefer("torch"):
        model = load_model(checkpoint, spec, placement)
        # Larger than the default, so that greedy tokens differ from step to step.
        tensors = {w.name: w.read().clone() * (10.0 if w.init == "normal" else 1.0) for w in model.weights()}
    save_file(tensors, folder / "model.safetensors")


def _greedy(args: ServerArgs) -> list[int]:
    """Tokens of three sequences, prompts of 40, 9 and 17, then 12 steps together."""
    worker, info = build_worker(args)
    rng, lengths = np.random.default_rng(0), np.array([40, 9, 17], np.int32)
    prompts = [rng.integers(0, info.vocab_size, length).astype(np.int32) for length in lengths]
    tokens: list[int] = []
    decoding = (decode_plan(step + 1, (lengths + step).astype(np.int32), _ROOM) for step in range(12))
    for plan in chain([prompt_plan(0, prompts, _ROOM)], decoding):
        worker.submit(plan)
        tokens += worker.collect().ids.tolist()
    worker.close()
    return tokens
