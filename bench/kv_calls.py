"""How long the longest calls of the tree of prefixes take at 50,000 nodes, and how fast pages are copied between the pool and the host's memory.

    python -m bench.kv_calls [--runs 3] [--output FILE]

Calls: milliseconds of the longest of each kind over 50,000 random prompts, each with a match, an insertion and releases, and evictions where there is
no room; garbage is collected as in a scheduler, after each thousand. Copies: 2,048 tokens of 32 layers of 5 heads of 64 (bfloat16), from the pool
into the host's memory and back, as `--kv-cache-host-size` copies them, and the same bytes by one memcpy in turns; the pool is on the CPU.
"""

import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from bench.kv_files import ids_of
from bench.program import parser_of, write_report
from headrace.attention.base import KvPool
from headrace.cache.base import Lease
from headrace.cache.host_pages import HostPages
from headrace.cache.radix_cache import RadixCache
from headrace.cache.tier import pages_at_once
from headrace.execution.page_transfer import PoolPages
from headrace.messages.packing import pack_int32

PAGE, NODES, PROMPTS, VOCAB = 16, 50_000, 50_000, 49_000
LAYERS, HEADS, HEAD_DIM, TOKENS = 32, 5, 64, 2048

_T = TypeVar("_T")


def longest_calls(seed: int) -> dict[str, Any]:
    """Of a tree: wall and processor time."""
    source = random.Random(seed)
    cache, free, leases = RadixCache(PAGE), list(range(250_000)), list[Lease | None]()
    worst: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def timed(name: str, call: Callable[..., _T], *arguments: Any) -> _T:
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        answer = call(*arguments)
        took = time.perf_counter() - begin, time.thread_time() - begin_cpu
        worst[name] = [max(pair) for pair in zip(worst[name], took, strict=True)]
        return answer

    def text(num_pages: int) -> list[int]:
        return [source.randrange(VOCAB) for _ in range(PAGE * num_pages)]

    begins = [text(source.randint(1, 8)) for _ in range(3000)]

    def prompt() -> None:
        begin = source.choice(begins)
        tokens = pack_int32(begin[: source.randint(0, len(begin) // PAGE) * PAGE] + text(source.randint(1, 3)))
        match = timed("match", cache.match, tokens, "", len(tokens) // 4)
        missing = len(tokens) // 4 // PAGE - len(match.pages)
        if len(free) < missing:
            free.extend(timed("evict", cache.evict, max(missing, source.choice([1, 8, 64]))))
        new = [free.pop() for _ in range(missing)]
        done = timed("insert", cache.insert, tokens, match.pages + new, "")
        free.extend(new[: max(0, done.num_existing // PAGE - len(match.pages))])
        timed("release", cache.release, match.lease)
        leases.append(done.lease)
        while len(leases) > source.choice([10, 60]):
            timed("release", cache.release, leases.pop(source.randrange(len(leases))))

    gc.collect()
    gc.disable()
    while cache.num_nodes < NODES:
        prompt()
    gc.collect()
    del free[2000:]
    worst.clear()
    for number in range(PROMPTS):
        prompt()
        if number % 1000 == 999:
            timed("collection", gc.collect, 1)
    in_ms = {name: [round(1e3 * seconds, 3) for seconds in both] for name, both in worst.items()}
    return {"nodes": cache.num_nodes, "wall_and_processor_ms": in_ms}


def copies(rounds: int = 15) -> dict[str, Any]:
    """Bytes a second out of the pool, into it, and of a memcpy: medians."""
    shape = (4 * TOKENS, HEADS, HEAD_DIM)
    k, v = ([torch.randn(shape).bfloat16() for _ in range(LAYERS)] for _ in "kv")
    pool = KvPool(k, v, shape[0], PAGE)
    pages = PoolPages(pool, list, dict)
    at_once, num_pages = pages_at_once(pages.page_bytes), TOKENS // PAGE
    memory = pages.host_memory((2 * num_pages + at_once) * pages.page_bytes)
    host = HostPages(memory, "", PAGE, pages.page_bytes, at_once)
    numbers = list(range(4 * num_pages))
    random.Random(0).shuffle(numbers)
    parts = [numbers[start : start + at_once] for start in range(0, num_pages, at_once)]
    parts[-1] = parts[-1][: num_pages - at_once * (len(parts) - 1)]
    plain, other = (np.ones(num_pages * pages.page_bytes, np.uint8) for _ in range(2))
    seconds = defaultdict[str, list[float]](list)
    for number in range(rounds):
        tokens = pack_int32(ids_of(number, TOKENS))
        keys = host.keys("", tokens)

        def back(keys: list[bytes] = keys, tokens: bytes = tokens) -> None:
            [run] = host.find(keys, tokens)
            for (_, data), places in zip(host.read(run, keys, at_once), parts, strict=True):
                pages.write(places, data)

        for name, act in (
            ("out", lambda keys=keys, tokens=tokens: host.write(keys, tokens, 0, map(pages.read, parts))),
            ("back", back),
            ("memcpy", lambda: np.copyto(plain, other)),
        ):
            begin = time.perf_counter()
            act()
            seconds[name].append(time.perf_counter() - begin)
    rates = {name: len(plain) / median(took) / 1e9 for name, took in seconds.items()}
    shares = {f"{name}_over_memcpy": round(rates[name] / rates["memcpy"], 3) for name in ("out", "back")}
    return {"bytes": len(plain), "gb_per_s": {name: round(rate, 2) for name, rate in rates.items()}, **shares}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    runs = range(options.runs)
    found = {"calls": [longest_calls(seed) for seed in runs], "copies": [copies() for _ in runs]}
    write_report(found, options.output)


if __name__ == "__main__":
    main()
