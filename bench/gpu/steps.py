"""Decode and prefill steps beside their floors. Weights and the KV cache are random, in the shapes of real models."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench.gpu.bench import Bench, Rows
from bench.gpu.floor import Work
from bench.gpu.plans import check_result, decode_plans, prompt_plan
from headrace.attention.triton import TritonAttention
from headrace.checkpoint.weight_formats import KERNEL_GROUP
from headrace.execution.build import build_worker
from headrace.execution.device_runner import DeviceRunner
from headrace.execution.worker import ModelWorker
from headrace.layers.quantization import formats
from headrace.messages.step import Worker

_SHOWN = 14


def add_kernel_times(bench: Bench, rows: Rows, what: str, steps: Callable[[], int]) -> None:
    """Profile `steps`, which gives the number of steps it ran, and add the kernels that take the most time of one. Nothing without a GPU."""
    if not bench.on_gpu:
        steps()
        return
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        num_steps = steps()
        torch.cuda.synchronize()
    kernels = [event for event in profiled.events() if event.device_type.name == "CUDA"]
    added, counts, done = Counter[str](), Counter[str](), 0.0
    for event in sorted(kernels, key=lambda event: event.time_range.end):
        # Launches overlap: a kernel takes what it adds to those before it.
        added[event.name] += max(0.0, event.time_range.end - max(done, event.time_range.start))
        counts[event.name] += 1
        done = max(done, event.time_range.end)
    total = sum(added.values())
    lines = [f"{us / num_steps:10.1f} us {counts[name] / num_steps:6.1f}x {name}" for name, us in added.most_common()]
    (bench.out / f"profile-{what.replace(' ', '-')}.txt").write_text("\n".join(lines) + "\n")
    step_us = total / num_steps
    rows.add(f"profile {what}", f"kernels take {step_us / 1e3:.3f} ms a step", seconds=step_us / 1e6)
    for name, us in added.most_common(_SHOWN):
        text = f"{us / num_steps:.1f} us, {counts[name] / num_steps:.1f} launches, {us / total:.1%}"
        rows.add(f"  {name[:60]}", text)


_ROOM = 64  # tokens behind the context of a measured sequence
_LEAST_SHARE = {1: 0.85, 16: 0.75, 64: 0.75, 256: 0.7}
"""Of the floor, by number of rows."""


def measure_decode(bench: Bench, rows: Rows) -> None:
    """Decode steps of the first model, two in flight as in a server, and the kernels of one and of 64 rows."""
    batches = bench.sizes.batches
    _decode(bench, rows, bench.options.models[0], batches, "", _LEAST_SHARE, batches[:1] + batches[2:])


def measure_experts(bench: Bench, rows: Rows) -> None:
    """Decode steps of a mixture of experts."""
    batches = bench.sizes.batches[:3:2]
    _decode(bench, rows, "qwen3-30b-a3b", batches, "", {1: 0.7, 64: 0.6}, batches)


def measure_deterministic(bench: Bench, rows: Rows) -> None:
    """Decode at 64 rows and the longest prompt, and the ratios to the default's figures."""
    model, batch, prompt = bench.options.models[0], bench.sizes.batches[-2], bench.sizes.prompts[-1]
    changes: dict[str, Any] = {"enable_deterministic_inference": True, "attention_backend": "triton"}
    changes = changes if bench.on_gpu else {}
    _decode(bench, rows, model, (batch,), ", deterministic", {}, (batch,), **changes)
    _prefill(bench, rows, model, prompt, ", deterministic", 0.0, **changes)
    for name, piece in ((decode_name(model, batch), "decode"), (prefill_name(model, prompt), "prefill")):
        _add_ratio(bench, rows, f"{name}: deterministic over default", 0.85, piece, name, f"{name}, deterministic")


def measure_quantized(bench: Bench, rows: Rows) -> None:
    """Decode at 1 and 64 rows and the longest prompt in fp8 and int4, and the ratios to bfloat16 at one row. int4 also in groups as large as those of
    GPTQ and AWQ files."""
    model, prompt = bench.options.models[0], bench.sizes.prompts[-1]
    batches, own, as_files = (bench.sizes.batches[0], bench.sizes.batches[-2]), KERNEL_GROUP, 128
    formats_of = (("fp8", 1.0, 1.6, own), ("int4", 0.625, 2.2, own), ("int4", 0.53125, 2.2, as_files))
    for quantization, num_bytes, least, group in formats_of:
        changes = {"quantization": quantization if bench.on_gpu else "int8"}
        what = f", {changes['quantization']}" + ("" if group == own else f" in groups of {group}")
        with patch.object(formats, "KERNEL_GROUP", group):
            chosen = batches if group == own else batches[:1]
            _decode(bench, rows, model, chosen, what, {}, chosen, num_bytes, **changes)
            if group == own:
                _prefill(bench, rows, model, prompt, what, 0.0, **changes)
        name = decode_name(model, batches[0])
        _add_ratio(bench, rows, f"{name}{what}, over bfloat16", least, "decode", name, f"{name}{what}")


def measure_prefill(bench: Bench, rows: Rows) -> None:
    """One prompt in one step."""
    for prompt in bench.sizes.prompts:
        _prefill(bench, rows, bench.options.models[0], prompt, "", 0.6 if prompt > 4096 else 0.0)


def decode_name(model: str, batch: int) -> str:
    """The name of a decode step in the results."""
    return f"decode {model}, batch {batch}"


def prefill_name(model: str, prompt: int) -> str:
    """The name of a prefill step in the results."""
    return f"prefill {model}, {prompt} tokens"


def _decode(
    bench: Bench,
    rows: Rows,
    model: str,
    batches: Sequence[int],
    what: str,
    least: dict[int, float],
    profiled: Sequence[int],
    bytes_per_weight: float = 2.0,
    **changes: Any,
) -> None:
    sizes, config = bench.sizes, bench.config(model)
    work = Work.of(config, bytes_per_weight)
    room = sizes.context + _ROOM
    fitting = [batch for batch in batches if work.fits(bench, batch * room, batch, room)]
    for batch in set(batches) - set(fitting):
        rows.add(f"{decode_name(model, batch)}{what}", "not measured: weights and KV cache do not fit")
    if not fitting:
        return
    largest = max(fitting)
    changes["cuda_graph_bs"] = ",".join(map(str, fitting)) if bench.on_gpu else ""
    limits = {"max_running_requests": largest, "context_length": room, "max_total_tokens": largest * room}
    args = bench.args(model, **limits, **changes)
    begin = time.perf_counter()
    worker, _ = build_worker(args)
    _fill_cache(worker)
    rows.add(f"weights and graphs of {model}{what}", f"{time.perf_counter() - begin:.1f} s")
    for batch in fitting:
        name = f"{decode_name(model, batch)}{what}"
        seconds = _decode_seconds(bench, worker, batch, room, config.vocab_size)
        floor = work.floor_s(bench, batch, 1, sizes.context)
        _add_share(rows, name, seconds, floor, batch, bench.least(least.get(batch, 0.0)))
    for batch in profiled if bench.on_gpu else ():
        if batch in fitting:
            steps = partial(_some_steps, worker, batch, room, config.vocab_size)
            add_kernel_times(bench, rows, f"{decode_name(model, batch)}{what}", steps)
    worker.close()


def _prefill(bench: Bench, rows: Rows, model: str, prompt: int, what: str, least: float, **changes: Any) -> None:
    work = Work.of(bench.config(model))
    room = prompt + _ROOM
    limits = {"max_running_requests": 1, "context_length": room, "max_total_tokens": room}
    worker, info = build_worker(bench.args(model, **limits, disable_cuda_graph=True, **changes))
    clock, seconds = bench.clock, []

    def step(number: int) -> int:
        tokens = np.random.default_rng(number).integers(0, info.vocab_size, prompt).astype(np.int32)
        plan = prompt_plan(number, [tokens], room)
        begin = clock.mark()
        worker.submit(plan)
        end = clock.mark()
        worker.collect()
        seconds.append(clock.seconds(begin, end))
        return 1

    for number in range(5):
        step(number)
    name = f"{prefill_name(model, prompt)}{what}"
    _add_share(rows, name, min(seconds), work.floor_s(bench, 1, prompt, 0), prompt, bench.least(least))
    if prompt > 4096:
        add_kernel_times(bench, rows, name, lambda: step(9))
    worker.close()


def _add_share(rows: Rows, what: str, seconds: float, floor: float, tokens: int, least: float) -> None:
    share = floor / seconds
    text = f"{seconds * 1e3:.2f} ms, {tokens / seconds:.0f} tok/s, {share:.0%} of the floor {floor * 1e3:.2f} ms"
    figures = {"step_s": seconds, "floor_s": floor, "share": share, "tokens_per_s": tokens / seconds}
    rows.add_at_least(what, text, share, least, **figures)


def _add_ratio(bench: Bench, rows: Rows, what: str, least: float, piece: str, before: str, after: str) -> None:
    own = rows.figure(after, "step_s")
    ratio = bench.figure(piece, before, "step_s") / own
    rows.add_at_least(what, f"{ratio:.2f}x", ratio, bench.least(least), ratio=ratio)


def _fill_cache(worker: Worker) -> None:
    """Random keys and values, in place of zeros."""
    runner = worker.runner if isinstance(worker, ModelWorker) else None
    if isinstance(runner, DeviceRunner) and isinstance(attention := runner.runner.attention, TritonAttention):
        for cache in (*attention.pool.k, *attention.pool.v):
            cache.copy_(torch.randn(cache.shape, dtype=torch.bfloat16, device=cache.device))


def _some_steps(worker: Worker, batch: int, room: int, vocab_size: int) -> int:
    num_steps = 6
    for plan, _ in zip(decode_plans(batch, room - _ROOM, vocab_size, room), range(num_steps), strict=False):
        worker.submit(plan)
        check_result(worker.collect())
    return num_steps


def _decode_seconds(bench: Bench, worker: Worker, batch: int, room: int, vocab_size: int) -> float:
    """Median seconds of a decode step, over `steps` steps."""
    clock, sizes = bench.clock, bench.sizes
    plans = decode_plans(batch, sizes.context, vocab_size, room)
    submit_ahead = bench.on_gpu
    marks = []
    for step in range(sizes.steps + 3):
        worker.submit(next(plans))
        marks.append(clock.mark())
        if step or not submit_ahead:
            check_result(worker.collect())
    if submit_ahead:
        check_result(worker.collect())
    return median(clock.seconds(a, b) for a, b in pairwise(marks[2:]))
