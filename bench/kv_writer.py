"""A tier that writes into a folder and is killed, again and again, and what the next one finds there. A part of `bench.kv_damage`.

A page has bytes that follow from the tokens up to its end, so that nobody must remember what was to be written.
"""

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.kv_files import ids_of
from headrace.cache.page_files import PageFiles
from headrace.cache.tier import DiskTier, Load, Store
from headrace.messages.packing import pack_int32
from headrace.messages.step import Sums

PAGE_TOKENS, PAGE_BYTES = 16, 64 << 10
LIMIT_BYTES = 256 << 20
"""Of all files: so that writers are also killed while they make room."""
MOST_BYTES = 24 << 20
"""That a writer writes before it dies."""


class Pages:
    """A `PageTransfer` of one prefix. given: pages that were written into it."""

    page_bytes = PAGE_BYTES

    def __init__(self) -> None:
        self.tokens = b""
        self.given: dict[int, bytes] = {}

    def fingerprint(self) -> str:
        return "pages of a bench"

    def facts(self) -> dict[str, str]:
        return {}

    def adapter(self, lora_id: int) -> str:
        return ""

    def host_memory(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def page(self, number: int) -> bytes:
        digest = hashlib.blake2b(self.tokens[: 4 * PAGE_TOKENS * (number + 1)]).digest()
        return digest * (PAGE_BYTES // len(digest))

    def read(self, pages: Sequence[int]) -> memoryview:
        return memoryview(b"".join(map(self.page, pages)))

    def read_into(self, pages: Sequence[int], into: memoryview) -> Sums:
        raise NotImplementedError

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        starts = range(0, len(data), PAGE_BYTES)
        self.given.update({page: bytes(data[at : at + PAGE_BYTES]) for page, at in zip(pages, starts, strict=True)})


def opened(folder: Path) -> tuple[DiskTier, Pages]:
    pages = Pages()
    tier = DiskTier(pages, lambda name: PageFiles(folder, name, PAGE_TOKENS, PAGE_BYTES, LIMIT_BYTES))
    tier.work()
    return tier, pages


def prefix(number: int) -> bytes:
    """Four each have their first pages in common."""
    source = random.Random(number)
    common = ids_of(number // 4, PAGE_TOKENS * 30)
    return pack_int32([*common, *ids_of(-number - 1, PAGE_TOKENS * source.randint(1, 60))])


def unfinished(folder: Path) -> list[Path]:
    return list(folder.rglob(".*.kv.*"))


def _dying_after(left: int) -> Callable[[int, Any], int]:
    """`os.write` that ends this process within the call that would write more than so many bytes in all."""
    write = os.write

    def until(descriptor: int, data: Any) -> int:
        nonlocal left
        if len(data) > left:
            write(descriptor, data[:left])
            os.kill(os.getpid(), signal.SIGKILL)
        left -= len(data)
        return write(descriptor, data)

    return until


def _write(folder: Path, first: int, most_bytes: int | None, begun: Connection) -> None:
    """In a process of its own: store prefixes, and tell which, until it dies. most_bytes: after which it does so by itself."""
    tier, pages = opened(folder)
    if most_bytes is not None:
        os.write = _dying_after(most_bytes)
    for number in itertools.count(first):
        begun.send(number)
        pages.tokens = prefix(number)
        tier.store(Store(pages.tokens, "", list(range(len(pages.tokens) // (4 * PAGE_TOKENS))), None))
        tier.work()


def found(folder: Path, numbers: Sequence[int]) -> Counter[str]:
    """What a new tier finds of prefixes: of whole and of some pages, and of none; pages that are not as they were to be."""
    counts: Counter[str] = Counter(wrong_pages=0)
    tier, pages = opened(folder)
    for number in numbers:
        pages.tokens, pages.given = prefix(number), {}
        load = Load(pages.tokens, "", 0)
        tier.look_up(load)
        tier.work()
        if not load.is_done:
            load.pages = list(range(load.num_found))
            tier.load(load)
            tier.work()
        whole = len(pages.given) * 4 * PAGE_TOKENS == len(pages.tokens)
        counts["whole" if whole else "part" if pages.given else "missed"] += 1
        counts["pages"] += load.num_loaded
        counts["wrong_pages"] += sum(pages.given.get(page) != pages.page(page) for page in range(load.num_loaded))
    counts["damaged_files"] = tier.num_damaged
    return counts


def killed_writers(folder: Path, kills: int, source: random.Random) -> dict[str, Any]:
    """Kill a writer at so many points. After each, what a new tier finds of its prefixes and of three earlier ones."""
    counts: Counter[str] = Counter()
    fork = multiprocessing.get_context("fork")
    known: list[int] = []

    def killed(kill: int, most_bytes: int | None, seconds: float = 0.0) -> float:
        """Returns how long it wrote."""
        heard, begun = fork.Pipe()
        process = fork.Process(target=_write, args=(folder, 1000 * kill, most_bytes, begun))
        process.start()
        begun.close()
        numbers = [heard.recv()]
        begin = time.perf_counter()
        if most_bytes is None:
            time.sleep(seconds)
            process.kill()
        process.join()
        took_s = time.perf_counter() - begin
        with contextlib.suppress(EOFError):
            while True:
                numbers.append(heard.recv())
        counts["killed"] += process.exitcode == -signal.SIGKILL
        counts["within_a_file"] += bool(unfinished(folder))
        counts.update(found(folder, [*numbers, *source.sample(known, min(3, len(known)))]))
        counts["unfinished"] += len(unfinished(folder))
        known.extend(numbers)
        return took_s

    most_s = killed(0, MOST_BYTES)
    for kill in range(1, kills):
        if kill % 2:
            killed(kill, source.randrange(MOST_BYTES))
        else:
            killed(kill, None, source.random() * most_s)
    return {name: counts[name] for name in _REPORTED}


_REPORTED = (
    "killed",
    "within_a_file",
    "whole",
    "part",
    "missed",
    "pages",
    "wrong_pages",
    "damaged_files",
    "unfinished",
)
