"""Pages, leases and sequence rows of admitted requests; all of them are allocated and freed here.

    pages of a request:
    [0, num_tree_pages)   the cache's, read-only for us (but `duplicate_pages` among them are ours)
    [num_tree_pages, ..)  ours: when full and computed they enter the cache, otherwise they are freed

Invariant, in pages: free + evictable + leased-in-cache + owned by requests == total.
"""

import numpy as np

from headrace.cache.allocator import PageAllocator
from headrace.cache.base import PrefixCache, PrefixMatch
from headrace.messages.control import PoolState
from headrace.messages.step import Int32Array
from headrace.scheduler.request import Req


class KVManager:
    """See the module docstring. max_seqs: rows of the worker's sequence table.

    num_left: how many rows constrained requests have left so far.
    """

    def __init__(self, allocator: PageAllocator, cache: PrefixCache, max_seqs: int) -> None:
        self.allocator = allocator
        self.cache = cache
        self.page_size = allocator.page_size
        self.max_seqs = max_seqs
        self._free_seqs = list(range(max_seqs - 1, -1, -1))
        self._left: list[int] = []
        self.num_left = 0
        self._owned_pages = 0

    @property
    def total_tokens(self) -> int:
        """Size of the pool, in tokens."""
        return self.allocator.num_pages * self.page_size

    @property
    def num_free_seqs(self) -> int:
        """Number of free rows in the worker's sequence table."""
        return len(self._free_seqs)

    @property
    def available_tokens(self) -> int:
        """Tokens that could be allocated now, including by eviction."""
        return (self.allocator.num_free + self.cache.num_evictable_pages) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages needed for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def match(self, req: Req) -> PrefixMatch:
        """Longest usable cached prefix of the request's known tokens, pinned."""
        return self.cache.match(req.cache_key(), req.asked.namespace, req.match_limit)

    def admit(self, req: Req, match: PrefixMatch) -> None:
        """Give the request a row and the matched prefix; the request now owns the lease."""
        req.seq = self._free_seqs.pop()
        req.lease = match.lease
        req.pages = list(match.pages)
        req.num_tree_pages = len(match.pages)
        req.rewind(match.num_tokens)

    def grow(self, req: Req, num_tokens: int) -> bool:
        """Allocate pages for `num_tokens` tokens of the request, evicting if needed. False: there is no room, and nothing has changed."""
        missing = self.pages_for(num_tokens) - len(req.pages)
        if missing <= 0:
            return True
        short = missing - self.allocator.num_free
        if short > 0:
            if short > self.cache.num_evictable_pages:
                return False
            # Evict a little more than needed, so that a full pool does not evict at every step.
            self.allocator.free(self.cache.evict(max(short, self.allocator.num_pages // 64)))
        req.pages += self.allocator.allocate(missing)
        self._owned_pages += missing
        return True

    def share(self, req: Req) -> None:
        """Add the computed whole pages of a running request to the cache, so that other requests can use them."""
        if req.shares_kv:
            self._insert(req)

    def release(self, req: Req) -> None:
        """Free everything of a request that no step in flight uses. Its computed KV stays cached, if that is allowed."""
        assert req.num_in_flight == 0, (req.rid, req.num_in_flight)
        if req.seq < 0:
            return
        if req.shares_kv and req.keep_kv:
            self._insert(req)
        own = req.duplicate_pages + req.pages[req.num_tree_pages :]
        self.allocator.free(own)
        self._owned_pages -= len(own)
        self.cache.release(req.lease)
        self._free_seqs.append(req.seq)
        if req.grammar is not None:
            self._left.append(req.seq)
            self.num_left += 1
        req.seq, req.lease, req.pages, req.num_tree_pages, req.duplicate_pages = -1, None, [], 0, []
        req.rewind(0)

    def take_left(self) -> tuple[int, ...]:
        """Rows of the worker's tables that constrained requests have left since the last call."""
        left, self._left = tuple(self._left), []
        return left

    def prefix_slots(self, req: Req) -> Int32Array:
        """Slots of the request's computed tokens, int32[num_computed]."""
        pages = np.array(req.pages[: self.pages_for(req.num_computed)], np.int32)
        slots = pages[:, None] * self.page_size + np.arange(self.page_size, dtype=np.int32)
        return slots.reshape(-1)[: req.num_computed].astype(np.int32)

    def flush(self) -> None:
        """Empty the cache. No request may hold a lease."""
        self.allocator.free(self.cache.flush())

    def repair(self) -> None:
        """Reset to an empty pool; only while no request is admitted."""
        self.cache.flush()
        self.allocator.reset()
        self._free_seqs = list(range(self.max_seqs - 1, -1, -1))
        self._owned_pages = 0

    def state(self) -> PoolState:
        """Current accounting, see `PoolState`."""
        size = self.page_size
        free, evictable = self.allocator.num_free, self.cache.num_evictable_pages
        leased = self.cache.num_leased_pages + self._owned_pages
        return PoolState(
            total_tokens=self.total_tokens,
            free_tokens=free * size,
            evictable_tokens=evictable * size,
            leased_tokens=leased * size,
            request_slots_total=self.max_seqs,
            request_slots_free=len(self._free_seqs),
            consistent=free + evictable + leased == self.allocator.num_pages,
        )

    def _insert(self, req: Req) -> None:
        num_full = req.num_computed // self.page_size
        if num_full <= req.num_tree_pages:
            return
        done = self.cache.insert(req.cache_key(num_full * self.page_size), req.pages, req.asked.namespace)
        existing, kept = done.num_existing // self.page_size, done.num_kept // self.page_size
        if kept == 0:
            return
        # The cache already had [num_tree_pages, existing): our pages of that range stay ours, as duplicates.
        duplicates = req.pages[req.num_tree_pages : existing]
        req.duplicate_pages += duplicates
        self._owned_pages -= max(0, kept - max(existing, req.num_tree_pages))
        req.num_tree_pages = kept
        self.cache.release(req.lease)
        req.lease = done.lease
