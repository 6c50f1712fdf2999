"""Requests through the scheduler: throughput, and the gap between decode steps."""

import math
import time
from itertools import pairwise
from statistics import median
from typing import NoReturn

import numpy as np

from headrace.benchmark.gpu.bench import Bench, Rows, row
from headrace.benchmark.gpu.marked_worker import MarkedWorker
from headrace.execution.build import build_worker
from headrace.messages.packing import pack_int32
from headrace.messages.requests import (
    BatchTokenizedGenerateReqInput,
    PromptContent,
    SampleTask,
    TokenizedGenerateReqInput,
)
from headrace.sampling.params import ResolvedSamplingParams


def measure_serving(bench: Bench, rows: Rows) -> None:
    """Requests through the scheduler, all there from the beginning; without tokenizer and HTTP."""
    from headrace.cache.allocator import PageAllocator
    from headrace.cache.radix_cache import RadixCache
    from headrace.messages.channel import LocalChannels
    from headrace.messages.outputs import BatchTokenIDOut
    from headrace.processes.scheduler_process import scheduler_config
    from headrace.scheduler.kv_manager import KVManager
    from headrace.scheduler.kv_part import KvPart
    from headrace.scheduler.scheduler import Scheduler

    def no_stop_strings(request: TokenizedGenerateReqInput) -> NoReturn:
        raise AssertionError("no request has stop strings")

    sizes, model = bench.sizes, bench.options.models[0]
    room = -(-(sizes.context + sizes.new_tokens + 32) // 32) * 32
    args = bench.args(
        model, max_running_requests=sizes.requests, context_length=room, max_total_tokens=sizes.requests * room,
        chunked_prefill_size=4096, max_prefill_tokens=4096,
    )  # fmt: skip
    worker, info = build_worker(args)
    clock = bench.clock
    marked = MarkedWorker(worker, clock)
    config, channels = bench.config(model), LocalChannels()
    pages = PageAllocator(info.max_total_tokens // info.page_size, info.page_size)
    scheduler = Scheduler(
        scheduler_config(args, config, info),
        KVManager([KvPart(pages, RadixCache(info.page_size))], info.max_running_requests),
        marked,
        channels.receiver("to_scheduler"),
        channels.sender("to_detokenizer"),
        channels.sender("to_tokenizer"),
        no_stop_strings,
    )
    outputs = channels.receiver("to_detokenizer")
    rng = np.random.default_rng(0)
    elapsed = 0.0
    for turn, new_tokens in enumerate((4, sizes.new_tokens)):  # the first warms up
        marked.steps.clear()
        sampling = ResolvedSamplingParams(max_new_tokens=new_tokens, seed=0, temperature=0.0, ignore_eos=True)
        requests = tuple(
            TokenizedGenerateReqInput(
                rid=f"{turn}-{i}",
                content=PromptContent(pack_int32(rng.integers(0, info.vocab_size, sizes.context).tolist())),
                task=SampleTask(sampling),
            )
            for i in range(sizes.requests)
        )
        begin = time.perf_counter()
        channels.sender("to_scheduler").send(BatchTokenizedGenerateReqInput(requests))
        waiting = sizes.requests
        while waiting:
            scheduler.run_once()
            while (message := outputs.recv_nowait()) is not None:
                assert isinstance(message, BatchTokenIDOut), message
                for out in message.rows:
                    if out.finish is not None:
                        assert out.finish.type == "length", out.finish
                        waiting -= 1
        elapsed = time.perf_counter() - begin
    rate = sizes.requests * sizes.new_tokens / elapsed
    rows.append(
        row(
            "serving throughput",
            f"{rate:.0f} output tok/s: {sizes.requests} requests, {sizes.context} -> {sizes.new_tokens} tokens of {model}",
            tokens_per_s=rate,
        )
    )
    full = [
        (a, b)
        for a, b in pairwise(marked.steps)
        if a.num_rows == a.num_tokens == b.num_rows == b.num_tokens == sizes.requests
    ]
    if not full:
        rows.append(row("gap between decode steps", "no two full decode steps in a row", ok=False))
    else:
        gap = median(clock.seconds(a.end, b.begin) for a, b in full)
        step = median(clock.seconds(a.begin, a.end) for a, _ in full)
        limit = 0.05 if bench.options.device == "cuda" else math.inf
        rows.append(
            row(
                "gap between decode steps",
                f"{gap * 1e6:.0f} us of {(gap + step) * 1e3:.2f} ms, {gap / (gap + step):.1%}",
                ok=gap < limit * (gap + step),
                expected="< 5%" if limit < 1 else "",
                gap_s=gap,
                step_s=step,
            )
        )
    marked.close()
