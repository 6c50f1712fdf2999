"""How much processor time the scheduler itself takes for one decode turn.

    .venv/bin/python -m bench.scheduler_turn [--rows 1 32 256] [--turns 200] [--no-stream] [--output FILE]

A turn plans a step, makes the worker's batch, commits the step before and makes its outputs. The worker behind it answers at once with the
same token for every row, and the outputs are thrown away. Every request streams (a chunk each turn), unless `--no-stream`.
Processor time, not wall time: what else runs on the machine hardly changes it. Prints JSON, milliseconds a turn.

It needs nothing of `bench`, so that it also measures another checkout, whose commit is in the JSON:

    PYTHONPATH=OTHER/src .venv/bin/python -m bench.scheduler_turn
"""

import argparse
import contextlib
import importlib
import json
import statistics
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from headrace.benchmark.machine import revision, this_machine
from headrace.cache.radix_cache import RadixCache
from headrace.garbage import freeze
from headrace.messages.channel import Message
from headrace.messages.packing import pack_int32
from headrace.messages.requests import (
    BatchTokenizedGenerateReqInput,
    PromptContent,
    SampleTask,
    TokenizedGenerateReqInput,
)
from headrace.messages.step import ModelWorkerBatch, StepResult
from headrace.sampling.params import ResolvedSamplingParams
from headrace.scheduler.kv_manager import KVManager
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.state import SchedulerConfig


def found(name: str, *modules: str) -> Any:
    """What one of these modules calls so: in another checkout it may be elsewhere."""
    for module in modules:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"no {name} in {', '.join(modules)}")


PageAllocator = found("PageAllocator", "headrace.cache.base", "headrace.cache.allocator")
KvPart = found("KvPart", "headrace.scheduler.kv_manager", "headrace.scheduler.kv_part")

PAGE_SIZE = 16
PROMPT_TOKENS = 64
WARM_UP_TURNS = 60
"""Enough to prefill 256 requests: a step with prompts has at most twice the tokens of the largest one before."""
VOCAB_SIZE = 32_000
TOKEN_S = 1e-6
"""What the worker says that a token took. Of steps that seem to take no time nothing is learnt, and no step with prompts would grow."""


class InstantWorker:
    """A `Worker` that gives token 7 to every row that samples."""

    weights = loras = profiler = experts = None

    def __init__(self) -> None:
        self._steps: deque[ModelWorkerBatch] = deque()

    def submit(self, batch: ModelWorkerBatch) -> None:
        self._steps.append(batch)

    def collect(self) -> StepResult:
        batch = self._steps.popleft()
        id_starts = np.zeros(len(batch.seqs) + 1, np.int32)
        np.cumsum(batch.num_logits, out=id_starts[1:])
        forward_s = TOKEN_S * int(batch.counts.sum())
        return StepResult(batch.step, np.full(id_starts[-1], 7, np.int32), id_starts, forward_s=forward_s)

    def idle(self, left: tuple[int, ...]) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Nothing to release."""


class Mailbox:
    """A channel that gives what was put into it and throws away what is sent."""

    dropped_frames = 0

    def __init__(self, *messages: Message) -> None:
        self._messages = deque(messages)

    def send(self, message: Message) -> None:
        """Throw it away."""

    def recv_nowait(self) -> Message | None:
        return self._messages.popleft() if self._messages else None

    def recv(self, timeout_s: float) -> Message | None:
        return self.recv_nowait()


def decoding(num_rows: int, num_turns: int, stream: bool) -> Scheduler:
    """A scheduler whose `num_rows` requests have been prefilled and decode for at least `num_turns` more turns."""
    params = ResolvedSamplingParams(max_new_tokens=num_turns + 2 * WARM_UP_TURNS, seed=0, ignore_eos=True)
    rng = np.random.default_rng(0)
    requests = tuple(
        TokenizedGenerateReqInput(
            str(i),
            PromptContent(pack_int32(rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist())),
            SampleTask(params, stream=stream),
        )
        for i in range(num_rows)
    )
    num_pages = num_rows * (2 + (PROMPT_TOKENS + params.max_new_tokens) // PAGE_SIZE)
    config = SchedulerConfig(
        policy="fcfs",
        chunk_tokens=num_rows * PROMPT_TOKENS,
        step_tokens=num_rows * PROMPT_TOKENS,
        max_running=num_rows,
        max_queued=num_rows,
        max_steps_in_flight=2,
        eos_token_ids=frozenset([2]),
        vocab_size=VOCAB_SIZE,
        stream_interval=1,
        max_step_s=0.25,
    )
    scheduler: Any = Scheduler(
        config,
        KVManager([KvPart(PageAllocator(num_pages, PAGE_SIZE), RadixCache(PAGE_SIZE))], num_rows),
        InstantWorker(),  # type: ignore[arg-type]
        Mailbox(BatchTokenizedGenerateReqInput(requests)),  # type: ignore[arg-type]
        Mailbox(),  # type: ignore[arg-type]
        Mailbox(),  # type: ignore[arg-type]
        lambda request: None,  # type: ignore[arg-type, return-value]
    )
    for _ in range(WARM_UP_TURNS):
        scheduler.run_once()
    assert all(req.num_outputs > 1 for req in scheduler.state.running), "not all requests decode"
    assert len(scheduler.state.running) == num_rows
    return scheduler


def measure(num_rows: int, num_turns: int, stream: bool) -> dict[str, float | int]:
    """Processor time of each turn, in milliseconds."""
    scheduler = decoding(num_rows, num_turns, stream)
    freeze()
    times = []
    for _ in range(num_turns):
        begin = time.process_time_ns()
        scheduler.run_once()
        times.append((time.process_time_ns() - begin) / 1e6)
    tenths = statistics.quantiles(times, n=10)
    return {
        "rows": num_rows,
        "turns": num_turns,
        "median_ms": round(statistics.median(times), 4),
        "p10_ms": round(tenths[0], 4),
        "p90_ms": round(tenths[-1], 4),
        "min_ms": round(min(times), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--no-stream", dest="stream", action="store_false")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    results = [measure(rows, options.turns, options.stream) for rows in options.rows]
    found = {
        **asdict(revision()),
        "machine": asdict(this_machine()),
        "stream": options.stream,
        "results": results,
    }
    text = json.dumps(found, indent=1)
    print(text, flush=True)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
