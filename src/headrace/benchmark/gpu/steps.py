"""Decode and prefill steps beside their floors. Weights are random, in the shapes of real models."""

from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch

from headrace.benchmark.gpu.bench import Bench, Rows, row
from headrace.benchmark.gpu.floor import Work
from headrace.benchmark.gpu.plans import check_result, decode_plans, sequence
from headrace.execution.build import build_worker
from headrace.messages.step import ModelWorkerBatch, Worker

_ROOM = 64  # tokens behind the context of a measured sequence


def measure_decode(bench: Bench, rows: Rows) -> None:
    """Decode steps of every model and batch, two in flight as in a server."""
    sizes = bench.sizes
    for model in bench.options.models:
        work = Work.of(bench.config(model))
        room = sizes.context + _ROOM
        batches = [batch for batch in sizes.batches if work.fits(bench, batch * room, batch, room)]
        for batch in sizes.batches:
            if batch not in batches:
                rows.append(row(decode_name(model, batch), "not measured: weights and KV cache do not fit"))
        if not batches:
            continue
        largest = max(batches)
        worker, _ = build_worker(
            bench.args(
                model, max_running_requests=largest, context_length=room, max_total_tokens=largest * room,
                cuda_graph_bs=",".join(map(str, batches)) if bench.options.device == "cuda" else "",
            )
        )  # fmt: skip
        for batch in batches:
            seconds = _decode_seconds(bench, worker, batch, room, bench.config(model).vocab_size)
            floor = work.floor_s(bench, batch, 1, sizes.context)
            expected = 0.0
            if model == "llama-3.1-8b" and not bench.options.tiny:
                expected = 0.85 if batch == 1 else 0.7
            rows.append(_share_row(decode_name(model, batch), seconds, floor, batch, expected))
        worker.close()
        del worker
        if bench.options.device == "cuda":
            torch.cuda.empty_cache()


def measure_prefill(bench: Bench, rows: Rows) -> None:
    """One prompt in one step."""
    prompt = bench.sizes.prompt
    for model in bench.options.models[:2]:
        work = Work.of(bench.config(model))
        room = prompt + _ROOM
        if not work.fits(bench, room, 1, room):
            rows.append(row(f"prefill {model}, {prompt} tokens", "not measured: weights and KV cache do not fit"))
            continue
        worker, info = build_worker(
            bench.args(
                model, max_running_requests=1, context_length=room, max_total_tokens=room, disable_cuda_graph=True
            )
        )
        clock, seconds = bench.clock, []
        for step in range(4):
            tokens = np.random.default_rng(step).integers(0, info.vocab_size, prompt).astype(np.int32)
            plan = ModelWorkerBatch(
                step,
                (sequence(0, tokens, np.empty(0, np.int32)),),
                np.zeros(1, np.int32),
                np.zeros(1, np.int32),
                np.array([prompt], np.int32),
                np.ones(1, np.int32),
                np.arange(prompt, dtype=np.int32),
            )
            begin = clock.mark()
            worker.submit(plan)
            end = clock.mark()
            worker.collect()
            seconds.append(clock.seconds(begin, end))
        worker.close()
        expected = 0.6 if model == "llama-3.1-8b" and not bench.options.tiny else 0.0
        floor = work.floor_s(bench, 1, prompt, 0)
        rows.append(_share_row(f"prefill {model}, {prompt} tokens", min(seconds), floor, prompt, expected))


def decode_name(model: str, batch: int) -> str:
    """The name of a decode step in the results."""
    return f"decode {model}, batch {batch}"


def _share_row(what: str, seconds: float, floor: float, tokens: int, expected: float) -> dict[str, Any]:
    share = floor / seconds
    text = f"{seconds * 1e3:.2f} ms, {tokens / seconds:.0f} tok/s, {share:.0%} of the floor {floor * 1e3:.2f} ms"
    return row(
        what, text, ok=not expected or share >= expected, expected=f">= {expected:.0%} of the floor" if expected else "",
        step_s=seconds, floor_s=floor, share=share, tokens_per_s=tokens / seconds,
    )  # fmt: skip


def _decode_seconds(bench: Bench, worker: Worker, batch: int, room: int, vocab_size: int) -> float:
    """Mean seconds of a decode step, over `steps` steps."""
    clock, sizes = bench.clock, bench.sizes
    plans = decode_plans(batch, sizes.context, vocab_size, room)
    submit_ahead = bench.options.device == "cuda"
    marks = []
    for step in range(sizes.steps + 3):
        worker.submit(next(plans))
        marks.append(clock.mark())
        if step or not submit_ahead:
            check_result(worker.collect())
    if submit_ahead:
        check_result(worker.collect())
    return median(clock.seconds(a, b) for a, b in pairwise(marks[2:]))
