"""A prefix cache around the tree sees all that a second tier of KV needs: what is computed, what is wanted, and pages that nobody uses."""

from dataclasses import replace

import numpy as np
import pytest
from fake_worker import Rig, expected_outputs

from headrace.cache.base import Insertion, Lease, PageAllocator, PrefixCache, PrefixMatch
from headrace.cache.radix_cache import TOKEN_BYTES


class CopyingCache:
    """A `PrefixCache` around another. It copies the KV of every page that enters the other one, and puts it back when a prefix is wanted
    that has been evicted. kv: what the worker keeps, by slot."""

    def __init__(self, inner: PrefixCache, allocator: PageAllocator, kv: np.ndarray) -> None:
        self.inner = inner
        self.shares = inner.shares
        self.num_restored_pages = 0
        self._allocator = allocator
        self._kv = kv.reshape(-1, allocator.page_size)
        self._page_bytes = allocator.page_size * TOKEN_BYTES
        self._copies: dict[tuple[str, bytes], np.ndarray] = {}

    @property
    def num_evictable_pages(self) -> int:
        return self.inner.num_evictable_pages

    @property
    def num_leased_pages(self) -> int:
        return self.inner.num_leased_pages

    def peek(self, tokens: bytes, namespace: str, limit: int) -> int:
        return self.inner.peek(tokens, namespace, limit)

    def match(self, tokens: bytes, namespace: str, limit: int) -> PrefixMatch:
        found = self.inner.match(tokens, namespace, limit)
        copies = []
        end = (len(found.pages) + 1) * self._page_bytes
        while end <= limit * TOKEN_BYTES and (copy := self._copies.get((namespace, tokens[:end]))) is not None:
            copies.append(copy)
            end += self._page_bytes
        short = len(copies) - self._allocator.num_free
        if not copies or short > self.num_evictable_pages:
            return found
        self._allocator.free(self.evict(max(0, short)))
        pages = self._allocator.allocate(len(copies))
        self._kv[pages] = copies
        self.num_restored_pages += len(pages)
        tokens = tokens[: end - self._page_bytes]
        lease = self.inner.insert(tokens, found.pages + pages, namespace).lease
        self.inner.release(found.lease)
        return replace(found, num_tokens=len(tokens) // TOKEN_BYTES, pages=found.pages + pages, lease=lease)

    def insert(self, tokens: bytes, pages: list[int], namespace: str) -> Insertion:
        done = self.inner.insert(tokens, pages, namespace)
        for i in range(done.num_existing // self._allocator.page_size, done.num_kept // self._allocator.page_size):
            self._copies[namespace, tokens[: (i + 1) * self._page_bytes]] = self._kv[pages[i]].copy()
        return done

    def release(self, lease: Lease | None) -> None:
        self.inner.release(lease)

    def evict(self, num_pages: int) -> list[int]:
        return self.inner.evict(num_pages)

    def flush(self) -> list[int]:
        self._copies.clear()
        return self.inner.flush()


def copying(**options: object) -> tuple[Rig, CopyingCache]:
    rig = Rig(**options)
    part = rig.kv.parts[0]
    part.cache = cache = CopyingCache(part.cache, part.allocator, rig.worker.kv)
    return rig, cache


def prompt(n: int, start: int) -> list[int]:
    return np.random.default_rng(start).integers(0, 2, n).tolist()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_evicted_prefix_comes_back_from_its_copy(page_size, overlap):
    rig, cache = copying(num_pages=48 // page_size, page_size=page_size, overlap=overlap)
    for i in range(12):  # more than fits, each of them three times
        rig.add(f"r{i}", prompt(20, start=i % 4), 6, ignore_eos=True)
        if i % 3 == 2:
            rig.drain()

    for i in range(12):
        assert rig.ids[f"r{i}"] == expected_outputs(prompt(20, start=i % 4), 6, 9, ignore_eos=True)
    assert cache.num_restored_pages > 0
    cached = [rig.rows[f"r{i}"][0].stats.cached_tokens for i in range(4, 12)]
    assert min(cached) >= 16, "only the first of each prompt computes it"
    rig.check_idle()


def test_a_restored_page_is_one_that_no_step_in_flight_uses():
    """Random load with retractions: the worker checks the KV of every position that it attends to."""
    rig, cache = copying(num_pages=16, page_size=2, max_running=6, eos_every=20)
    rig.state.ratio.scale(0.1)
    rng = np.random.default_rng(0)
    for i in range(80):
        rig.add(f"r{i}", prompt(int(rng.integers(4, 20)), start=int(rng.integers(0, 6))), int(rng.integers(1, 12)))
        for _ in range(int(rng.integers(0, 4))):
            rig.turn()
    rig.drain()

    assert cache.num_restored_pages > 20
    assert rig.state.counters.num_retracted > 0
    assert len(rig.finish) == 80
    assert {finish.type for finish in rig.finish.values()} <= {"stop", "length"}
    rig.check_idle()
