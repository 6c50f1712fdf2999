"""Tokens of small models through whole engines: on the GPU and on the CPU, by graphs and eagerly, overlapped or not, alone and in batches.

In float32, so that near ties do not decide. Engines run in this process.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.gpu.bench import Bench, Rows
from bench.gpu.options import CONFIGS
from bench.gpu.tokens import save_small
from headrace.api.engine import Engine
from headrace.api.options import SamplingOptions

_NEW_TOKENS = 24
GREEDY: SamplingOptions = {"temperature": 0.0, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}
_DRAWN: SamplingOptions = {**GREEDY, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 7}
_PENALISED: SamplingOptions = {**GREEDY, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
_BIASED: SamplingOptions = {**GREEDY, "logit_bias": {"5": 4.0, "9": -100.0}}
ON_CPU: dict[str, Any] = {"device": "cpu", "disable_native_kernels": True}


def compare_tokens(bench: Bench, rows: Rows) -> None:
    """What each way of computing gives, beside what the GPU gives by default."""
    on = {"device": bench.options.device}
    ways: dict[str, dict[str, Any]] = {
        "CPU": ON_CPU,
        "no graphs": {**on, "disable_cuda_graph": True},
        "no overlap": {**on, "disable_overlap_schedule": True},
        "chunks of 16": {**on, "chunked_prefill_size": 16},
        "retraction (a small pool)": {**on, "max_total_tokens": 420},
        "no prefix cache": {**on, "disable_radix_cache": True},
        "batch-invariant": {**on, "enable_deterministic_inference": True},
        "n-grams": {**on, "speculative_algorithm": "ngram"},
        "torch's attention": {**on, "attention_backend": "torch_native"},
    }
    if not bench.on_gpu:
        ways.pop("batch-invariant")
    with TemporaryDirectory() as name:
        save_small(Path(name))
        want, seconds = answers(name, on)
        rows.add("engine by default", f"{sum(map(len, want))} tokens in {seconds:.1f} s")
        for what, options in ways.items():
            with rows.failure_of(f"tokens: {what}"):
                got, seconds = answers(name, options)
                differ = differing(want, got)
                text = f"{differ} of {len(want)} requests differ, {seconds:.1f} s"
                rows.add(f"tokens: {what}", text, ok=differ == 0, expected="0")


def differing(want: list[list[int]], got: list[list[int]]) -> int:
    """How many requests have other tokens."""
    return sum(a != b for a, b in zip(want, got, strict=True))


def _prompts() -> list[list[int]]:
    """Prompts of several lengths, the second half of which begin as the first."""
    rng = np.random.default_rng(0)
    first = [rng.integers(3, 150, n).tolist() for n in (5, 9, 17, 33, 40, 64)]
    return first + [prompt + rng.integers(3, 150, 5).tolist() for prompt in first]


def answers(folder: str, options: dict[str, Any]) -> tuple[list[list[int]], float]:
    """Output ids of every prompt in a batch, the first alone, and again (cached); and the seconds."""
    with small_engine(folder, options) as engine:
        begin = time.perf_counter()
        prompts = _prompts()
        kinds = [GREEDY, _DRAWN, _PENALISED, _BIASED]
        batch = [kinds[i % len(kinds)] for i in range(len(prompts))]
        got = [out["output_ids"] for out in engine.generate(input_ids=prompts, sampling_params=batch)]
        got += [engine.generate(input_ids=prompts[i], sampling_params=batch[i])["output_ids"] for i in range(4)]
        got += [out["output_ids"] for out in engine.generate(input_ids=prompts, sampling_params=batch)]
        return got, time.perf_counter() - begin


def small_engine(folder: str, options: dict[str, Any]) -> Engine:
    """An engine of one process without a tokenizer, in float32."""
    defaults: dict[str, Any] = {
        "single_process": True, "skip_tokenizer_init": True, "dtype": "float32", "max_total_tokens": 4096, "max_running_requests": 16,
    }  # fmt: skip
    return Engine(model_path=folder, **(defaults | options))


def measure_speculation(bench: Bench, rows: Rows) -> None:
    """Tokens a second of one stream that repeats itself, with drafts and without, in bfloat16; and whether its tokens are the same."""
    phrase = np.random.default_rng(3).integers(3, 150, 40).tolist()
    prompt, new = phrase * (2 if bench.tiny else 20), 16 if bench.tiny else 256
    sampling: SamplingOptions = {**GREEDY, "max_new_tokens": new}
    got: dict[str, tuple[list[int], float]] = {}
    for what, options in (("off", {}), ("ngram", {"speculative_algorithm": "ngram"})):
        engine_options: dict[str, Any] = {
            "load_format": "dummy", "json_model_override_args": bench.overrides, "dtype": "auto", "context_length": 2048,
            "max_total_tokens": 8192, "max_running_requests": 4, "device": bench.options.device, **options,
        }  # fmt: skip
        with small_engine(str(CONFIGS / bench.options.models[0]), engine_options) as engine:
            engine.generate(input_ids=prompt[:20], sampling_params=sampling)
            begin = time.perf_counter()
            ids = engine.generate(input_ids=prompt, sampling_params=sampling)["output_ids"]
            got[what] = ids, len(ids) / (time.perf_counter() - begin)
        rows.add(f"one stream, drafts {what}", f"{got[what][1]:.1f} tok/s", tokens_per_s=got[what][1])
    same = next((i for i, (a, b) in enumerate(zip(got["off"][0], got["ngram"][0], strict=True)) if a != b), new)
    rows.add("tokens with drafts", f"equal up to {same} of {new} (bfloat16: a near tie may differ)")
