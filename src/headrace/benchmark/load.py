"""When requests are sent: a closed loop with a fixed number in flight, or arrivals at a rate.

Owns the schedule of one workload and the wall clock around it. Runs in the event loop of the benchmark client.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from headrace.benchmark.figures import RequestRecord
from headrace.benchmark.targets import Target
from headrace.benchmark.workloads import Answer, Workload


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The records in the order of the prompts, and the seconds from the first request sent to the last one answered. beside: of what was sent beside
    them."""

    records: list[RequestRecord]
    duration_s: float
    beside: list[RequestRecord] = field(default_factory=list)


def arrival_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which each request of a Poisson process of `rate` requests per second arrives."""
    rng = random.Random(seed)
    times, now_s = [], 0.0
    for _ in range(num_requests):
        times.append(now_s)
        now_s += rng.expovariate(rate)
    return times


async def run_closed_loop(
    target: Target, workload: Workload, concurrency: int, on_done: Callable[[], None] = lambda: None
) -> LoadResult:
    """Keep `concurrency` requests in flight until all prompts are answered. The first ones start as the preset says."""
    records: dict[int, RequestRecord] = {}
    pending = iter(enumerate(workload.prompts))

    async def one_client(number: int) -> None:
        await asyncio.sleep(number * workload.preset.start_gap_s)
        for index, prompt in pending:
            records[index] = await target.complete(prompt, workload.preset.answer)
            on_done()

    start_s = time.perf_counter()
    await asyncio.gather(*(one_client(number) for number in range(concurrency)))
    return LoadResult([records[index] for index in sorted(records)], time.perf_counter() - start_s)


async def run_open_loop(
    target: Target, workload: Workload, rate: float, seed: int, on_done: Callable[[], None] = lambda: None
) -> LoadResult:
    """Send each prompt when it arrives, however many are in flight: Poisson arrivals at `rate` requests per second."""

    async def one_request(prompt: list[int], arrives_s: float) -> RequestRecord:
        await asyncio.sleep(arrives_s)
        record = await target.complete(prompt, workload.preset.answer)
        on_done()
        return record

    times = arrival_times(len(workload.prompts), rate, seed)
    start_s = time.perf_counter()
    records = await asyncio.gather(
        *(one_request(prompt, arrives_s) for prompt, arrives_s in zip(workload.prompts, times, strict=True))
    )
    return LoadResult(list(records), time.perf_counter() - start_s)


async def with_beside(target: Target, workload: Workload, load: Awaitable[LoadResult]) -> LoadResult:
    """Await the load, and meanwhile send what the workload has beside its prompts; the last of these requests is waited for."""
    records: list[RequestRecord] = []
    is_over = asyncio.Event()

    async def client() -> None:
        for prompt in workload.beside:
            if is_over.is_set():
                return
            records.append(await target.complete(prompt, Answer(1)))

    sent = asyncio.create_task(client())
    await asyncio.sleep(0)
    try:
        done = await load
    finally:
        is_over.set()
        await sent
    return replace(done, beside=records)
