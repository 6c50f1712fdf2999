"""Pages, leases and sequence rows of admitted requests; all of them are allocated and freed here.

    pages of a request:
    [0, num_tree_pages)   the cache's, read-only for us (but `duplicate_pages` among them are ours)
    [num_tree_pages, ..)  ours: when full and computed they enter the cache, otherwise they are freed

With --enable-dp-attention there are several parts, one for each rank; all pages of a request are of the part that it was admitted to. Pages are
numbered over all parts, so that one number never means two pages. Runs in the scheduler's thread.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.cache.base import PageAllocator, Parted, PrefixCache, PrefixMatch, Weights
from headrace.messages.control import CacheNode, PoolState
from headrace.messages.outputs import CacheMiss, MissReason
from headrace.messages.step import Int32Array
from headrace.scheduler.request import Req

AHEAD_PAGES, AHEAD_SHARE = 16, 8
"""With a tier: what a running request has computed enters the cache by so many pages, or by a part of all that is so large."""


@dataclass(slots=True)
class KvPart:
    """Free pages, cached prefixes, and the number of pages that requests own.

    Invariant, in pages: free + evictable + leased-in-cache + owned by requests == total.
    """

    allocator: PageAllocator
    cache: PrefixCache
    num_owned_pages: int = 0
    _weights_of: Parted[int, Weights] = field(default_factory=Parted)

    @property
    def num_available_pages(self) -> int:
        """Pages that could be allocated now, including by eviction."""
        return self.allocator.num_free + self.cache.num_evictable_pages

    @property
    def num_leased_pages(self) -> int:
        """Pages that requests own or hold leases on."""
        return self.cache.num_leased_pages + self.num_owned_pages

    @property
    def is_consistent(self) -> bool:
        return self.num_available_pages + self.num_leased_pages == self.allocator.num_pages

    def oldest(self, pages: Iterable[int], now: Weights) -> Weights:
        """The oldest weights that any KV of these pages depends on; those of `now` if there are none."""
        if not now.number:
            return now
        return min((self._weights_of[page] for page in pages), key=lambda one: one.number, default=now)

    def grow(self, num_pages: int, weights: Weights) -> list[int] | None:
        """Allocate this many pages for KV that depends on no older weights, evicting if needed. None: there is no room, and nothing has changed."""
        short = num_pages - self.allocator.num_free
        if short > 0:
            if short > self.cache.num_evictable_pages:
                return None
            # Evict a little more than needed, so that a full pool does not evict at every step.
            self.allocator.free(self.cache.evict(max(short, self.allocator.num_pages // 64)))
        self.num_owned_pages += num_pages
        pages = self.allocator.allocate(num_pages)
        self._weights_of.update(dict.fromkeys(pages, weights))
        return pages

    def give_back(self, pages: list[int]) -> None:
        self.allocator.free(pages)
        self.num_owned_pages -= len(pages)

    def flush(self, why: MissReason) -> None:
        """Empty the cache. No request may hold a lease."""
        self.allocator.free(self.cache.flush(why))

    def repair(self) -> None:
        self.cache.flush("flushed")
        self.allocator.reset()
        self.num_owned_pages = 0


class KVManager:
    """See the module docstring. parts: of equal size. max_seqs: rows of the worker's sequence table.

    unshared_from: outputs from this position on never enter the cache: as part of a prompt they would be computed otherwise. None = they all may.
    num_left: how many rows requests have left so far. on_insert: called with the part, tokens and namespace of a prefix that the cache did not have
    as a whole before. on_short: called where pages are missing, and before all of them are taken back: lets go of what no step needs.
    weights: those of the steps.
    on_flush: called before all are taken back: lets go of what is pinned.
    """

    def __init__(self, parts: Sequence[KvPart], max_seqs: int, unshared_from: int | None = None) -> None:
        self.parts = parts
        self.page_size = parts[0].allocator.page_size
        self.max_seqs = max_seqs
        self.unshared_from = unshared_from
        self._free_seqs = list(range(max_seqs - 1, -1, -1))
        self._left: list[int] = []
        self.num_left = 0
        self.weights = Weights()
        self.on_insert: Callable[[int, bytes, str], None] = lambda part, tokens, namespace: None
        self.on_short: Callable[[], None] = lambda: None
        self.on_flush: Callable[[], None] = lambda: None

    @property
    def total_tokens(self) -> int:
        return self.part_tokens * len(self.parts)

    @property
    def part_tokens(self) -> int:
        """Size of a part, in tokens: no request can have more."""
        return self.parts[0].allocator.num_pages * self.page_size

    @property
    def num_free_seqs(self) -> int:
        return len(self._free_seqs)

    @property
    def shares(self) -> bool:
        """Whether requests may find what others have computed."""
        return self.parts[0].cache.shares

    def available_tokens(self, part: int) -> int:
        """Tokens that could be allocated now in a part, including by eviction."""
        return self.parts[part].num_available_pages * self.page_size

    def leased_tokens(self, part: int) -> int:
        """Tokens of a part, in whole pages, that requests use."""
        return self.parts[part].num_leased_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def peek(self, req: Req) -> list[int]:
        """Length in tokens of the prefix that `match` would find in each part."""
        key, limit = req.cache_key(), req.match_limit
        return [part.cache.peek(key, req.asked.namespace, limit) for part in self.parts]

    def match(self, req: Req, part: int) -> PrefixMatch:
        """Longest usable prefix of the request's known tokens that is cached in a part, pinned."""
        match = self.parts[part].cache.match(req.cache_key(), req.asked.namespace, req.match_limit)
        if req.tail_page >= 0 and match.num_tokens == req.num_prompt_tokens // self.page_size * self.page_size:
            return PrefixMatch(req.num_prompt_tokens, [*match.pages, req.tail_page], match.lease)
        return match

    def explain(self, req: Req) -> CacheMiss | None:
        """Why no more of the request's known tokens was found in its part."""
        return self.parts[req.part].cache.explain(req.cache_key(), req.asked.namespace, req.match_limit)

    def unpin(self, match: PrefixMatch, part: int) -> None:
        self.parts[part].cache.release(match.lease)

    def admit(self, req: Req, match: PrefixMatch, part: int) -> None:
        """Give the request a row and the prefix matched in a part; the request now owns the lease and belongs to the part."""
        req.seq = self._free_seqs.pop()
        req.part = part
        req.lease = match.lease
        req.pages = list(match.pages)
        req.num_tree_pages = len(match.pages)
        if match.num_tokens % self.page_size:
            req.num_tree_pages -= 1
            req.tail_page = -1
        req.kv_weights = self.parts[part].oldest(match.pages, self.weights)
        req.rewind(match.num_tokens)

    def grow(self, req: Req, num_tokens: int) -> bool:
        """Allocate pages for `num_tokens` tokens of the request, evicting if needed. False: there is no room, and nothing has changed."""
        missing = self.pages_for(num_tokens) - len(req.pages)
        if missing <= 0:
            return True
        pages = self.parts[req.part].grow(missing, req.kv_weights)
        if pages is None:
            self.on_short()
            pages = self.parts[req.part].grow(missing, req.kv_weights)
        if pages is None:
            return False
        req.pages += pages
        return True

    def share(self, req: Req) -> None:
        """Add the computed whole pages of a running request to the cache, so that other requests can use them."""
        if req.shares_kv:
            self._insert(req)

    def share_ahead(self, req: Req) -> None:
        """`share`, once there is much of it that the cache does not have: so often that a death loses little, and so rarely that prefixes of one
        request do not take more time than the request."""
        num_full = req.num_computed // self.page_size
        if num_full - req.num_tree_pages >= max(AHEAD_PAGES, num_full // AHEAD_SHARE):
            self.share(req)

    def release(self, req: Req) -> None:
        """Free everything of a request that no step in flight uses. Its computed KV stays cached, if that is allowed."""
        assert req.num_in_flight == 0, (req.rid, req.num_in_flight)
        if req.seq < 0:
            return
        if req.shares_kv and req.keep_kv:
            self._insert(req)
        part = self.parts[req.part]
        part.give_back(req.duplicate_pages + req.pages[req.num_tree_pages :])
        part.cache.release(req.lease)
        self._free_seqs.append(req.seq)
        self._left.append(req.seq)
        self.num_left += 1
        req.seq, req.lease, req.pages, req.num_tree_pages, req.duplicate_pages = -1, None, [], 0, []
        req.rewind(0)

    def take_left(self) -> tuple[int, ...]:
        """Rows of the worker's tables that requests have left since the last call."""
        left, self._left = tuple(self._left), []
        return left

    def prefix_slots(self, req: Req) -> Int32Array:
        """Slots of the request's computed tokens, int32[num_computed]."""
        pages = np.array(req.pages[: self.pages_for(req.num_computed)], np.int32)
        slots = pages[:, None] * self.page_size + np.arange(self.page_size, dtype=np.int32)
        return slots.reshape(-1)[: req.num_computed].astype(np.int32)

    def weights_changed(self, name: str) -> None:
        """What is computed from now on is of new weights."""
        self.on_short()
        self.weights = Weights(self.weights.number + 1, name)

    def flush(self, why: MissReason = "flushed") -> None:
        """Empty the cache. No request may hold a lease. why: what later requests are told that miss it."""
        self.on_short()
        self.on_flush()
        for part in self.parts:
            part.flush(why)

    def repair(self) -> None:
        """Reset to an empty pool; only while no request is admitted."""
        self.on_short()
        self.on_flush()
        for part in self.parts:
            part.repair()
        self._free_seqs = list(range(self.max_seqs - 1, -1, -1))

    def state(self) -> PoolState:
        size, parts = self.page_size, self.parts
        return PoolState(
            total_tokens=self.total_tokens,
            free_tokens=sum(part.allocator.num_free for part in parts) * size,
            evictable_tokens=sum(part.cache.num_evictable_pages for part in parts) * size,
            leased_tokens=sum(part.num_leased_pages for part in parts) * size,
            request_slots_total=self.max_seqs,
            request_slots_free=len(self._free_seqs),
            consistent=all(part.is_consistent for part in parts),
        )

    def tokens_of(self, owner: str | None) -> int:
        """Cached tokens of an API key; None: of those without one."""
        return sum(part.cache.num_pages_of(owner) for part in self.parts) * self.page_size

    @property
    def num_nodes(self) -> int:
        return sum(part.cache.num_nodes for part in self.parts)

    @property
    def num_cached_tokens(self) -> int:
        pages = sum(part.cache.num_evictable_pages + part.cache.num_leased_pages for part in self.parts)
        return pages * self.page_size

    def outline(self, max_depth: int, max_nodes: int) -> list[CacheNode]:
        """`PrefixCache.outline` of each part, one after the other; each gets an even share of `max_nodes`."""
        found: list[CacheNode] = []
        for index, part in enumerate(self.parts):
            nodes = part.cache.outline(max_depth, (max_nodes - len(found)) // (len(self.parts) - index))
            begin = len(found)
            found += [
                node if node.parent < 0 else msgspec.structs.replace(node, parent=node.parent + begin) for node in nodes
            ]
        return found

    def _insert(self, req: Req) -> None:
        num_shared = req.num_computed
        if self.unshared_from is not None:
            num_shared = min(num_shared, max(req.num_prompt_tokens, self.unshared_from))
        num_full = num_shared // self.page_size
        if num_full <= req.num_tree_pages:
            return
        part = self.parts[req.part]
        tokens = req.cache_key(num_full * self.page_size)
        done = part.cache.insert(tokens, req.pages, req.asked.namespace)
        existing, kept = done.num_existing // self.page_size, done.num_kept // self.page_size
        if kept == 0:
            return
        # The cache already had [num_tree_pages, existing): our pages of that range stay ours, as duplicates.
        duplicates = req.pages[req.num_tree_pages : existing]
        req.duplicate_pages += duplicates
        part.num_owned_pages -= max(0, kept - max(existing, req.num_tree_pages))
        req.num_tree_pages = kept
        part.cache.release(req.lease)
        req.lease = done.lease
        if existing < kept:
            self.on_insert(req.part, tokens, req.asked.namespace)
