"""Requests whose prefix is being loaded from a tier behind the tree, and prefixes on their way into it.

A request never waits longer than computing would take, as far as steps and loads are known: it goes on without what has not arrived, and others pass
it meanwhile. Pages are taken for all of a load at once or not at all, so no two loads wait for one another; all that is held here is released when
the pool runs short.

Owns the loads and stores that are not done, and their pages and leases. Does not own the tier (`cache.tier`). Runs in the scheduler's thread.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from headrace.cache.base import Lease
from headrace.cache.radix_cache import TOKEN_BYTES
from headrace.cache.tier import DiskTier, Load, Store
from headrace.messages import namespaces
from headrace.messages.control import TierStats
from headrace.scheduler.kv_manager import KVManager
from headrace.scheduler.request import Req

_T = TypeVar("_T")

LEAST_PAGES = 4
"""Fewer pages than that are computed, not loaded."""

FIRST_SHARE = 0.1
"""How long nothing may arrive, of the time that computing would take, while it is not known how fast the tier is."""

AHEAD_SHARE = 0.25
"""Of the pool: when less than that is free, so much of what is evicted next is stored (`writes_back`)."""

STORED_SHARE = 0.25
"""Of the pool: while more than that waits to be stored, nothing is added."""


@dataclass(eq=False, slots=True)
class _Loading:
    """A load and the requests that wait for it. part: of the KV cache. lease: on what the tree had before."""

    load: Load
    part: int
    lease: Lease | None = None


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request, since when it has waited, and the pages that it lacks."""

    req: Req
    loading: _Loading
    since_s: float
    num_lacking: int


class TierQueue:
    """See the module docstring. Iterates over the requests in order of arrival, without those that have ended.

    prompt_seconds: what computing `count` tokens of a prompt from position `start` takes; 0.0 = not known, and unknown_token_s each is taken for it.
    persists_tenants: also what belongs to a key or a salt is stored. writes_back: prefixes are stored when they are among the next to be evicted,
    and at the end; else as soon as the cache has them.
    """

    def __init__(
        self,
        tier: DiskTier,
        kv: KVManager,
        prompt_seconds: Callable[[int, int], float],
        persists_tenants: bool = False,
        unknown_token_s: float = 1e-4,
        writes_back: bool = False,
    ) -> None:
        self.tier = tier
        self._kv = kv
        self.prompt_seconds = prompt_seconds
        self.persists_tenants = persists_tenants
        self._unknown_token_s = unknown_token_s
        self.writes_back = writes_back
        self._waiting: list[_Waiting] = []
        self._loads: list[_Loading] = []
        self._stores: list[tuple[int, Store]] = []
        self._held: list[tuple[Req, int, Lease | None]] = []
        kv.on_insert, kv.on_short = self._inserted, self.give_up
        self.num_dropped = 0

    def __iter__(self) -> Iterator[Req]:
        return (one.req for one in self._waiting if one.req.finish is None)

    def __len__(self) -> int:
        return sum(one.req.finish is None for one in self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits here, or pages are held."""
        return bool(self._waiting or self._loads or self._stores or self._held)

    def add(self, req: Req, now_s: float) -> bool:
        """Look for the request's prefix in the tier. False: it need not wait."""
        size = self._kv.page_size
        known = self._kv.peek(req)
        part = max(range(len(known)), key=known.__getitem__)
        wanted = req.match_limit // size - known[part] // size
        if wanted < LEAST_PAGES or self.tier.opens_in_s == math.inf or not self._may_persist(req.asked.namespace):
            return False
        tokens, namespace = req.cache_key(req.match_limit // size * size), req.asked.namespace
        loading = next(
            (one for one in self._loads if _serves(one.load, tokens, namespace, known[part] // size, size)), None
        )
        if loading is None:
            loading = _Loading(Load(tokens, namespace, known[part] // size), part)
            self._loads.append(loading)
            self.tier.look_up(loading.load)
        self._waiting.append(_Waiting(req, loading, now_s, wanted))
        return True

    def take_ready(self, now_s: float) -> list[Req]:
        """Remove the requests that need not wait any longer, in order of arrival. Called once a turn."""
        if not self.is_busy:
            return []
        for loading in self._loads:
            self._go_on(loading)
        ready = [one for one in self._waiting if one.req.finish is None and self.is_over(one, now_s)]
        self._waiting = [one for one in self._waiting if one.req.finish is None and one not in ready]
        wanted = {id(one.loading) for one in self._waiting}
        done, self._loads = _divided(self._loads, lambda loading: loading.load.is_done or id(loading) not in wanted)
        self.tier.withdraw(loading.load for loading in done)
        for loading in done:
            lease = self._enter(loading)
            self._held += [(one.req, loading.part, lease) for one in ready if one.loading is loading][:1]
            if not any(one.loading is loading for one in ready):
                self._kv.parts[loading.part].cache.release(lease)
        self._release()
        return [one.req for one in ready]

    def give_up(self) -> None:
        """Let go of all pages: requests wait no longer for loads, and what is not stored yet is dropped."""
        self.num_dropped += sum(not store.is_done for _, store in self._stores)
        self.tier.withdraw([*(loading.load for loading in self._loads), *(store for _, store in self._stores)])
        for loading in self._loads:
            self._kv.parts[loading.part].cache.release(self._enter(loading))
        self._loads = []
        for _, part, lease in self._held:
            self._kv.parts[part].cache.release(lease)
        self._held = []
        self._release()

    def close(self) -> None:
        """Store what is still to be stored, and end the tier's thread. No step is in flight."""
        if self.writes_back:
            for part, kv_part in enumerate(self._kv.parts):
                for taken in reversed(kv_part.cache.take_oldest(kv_part.allocator.num_pages)):
                    self._store(part, *taken, share=1.0)
        self.tier.close()

    def stats(self) -> TierStats:
        size, tier = self._kv.page_size, self.tier
        return TierStats(tier.num_stored * size, tier.num_loaded * size, self.num_dropped, tier.num_damaged)

    # -- inside

    def _may_persist(self, namespace: str) -> bool:
        if not namespace:
            return True
        parts = namespaces.read(namespace)
        return self.persists_tenants or not (parts.key_name or parts.cache_salt)

    def _inserted(self, part: int, tokens: bytes, namespace: str) -> None:
        """The tree has whole pages that it had not before: keep them, or those that will have to make room."""
        if not self.writes_back:
            self._store(part, tokens, namespace)
            return
        allocator = self._kv.parts[part].allocator
        ahead = int(AHEAD_SHARE * allocator.num_pages)
        if allocator.num_free < ahead:
            for taken in self._kv.parts[part].cache.take_oldest(ahead):
                self._store(part, *taken)

    def _store(self, part: int, tokens: bytes, namespace: str, share: float = STORED_SHARE) -> None:
        if self.tier.opens_in_s == math.inf or not self._may_persist(namespace):
            return
        kv_part = self._kv.parts[part]
        held = {page for _, store in self._stores for page in store.pages}
        if len(held) > share * kv_part.allocator.num_pages:
            self.num_dropped += 1
            return
        match = kv_part.cache.match(tokens, namespace, len(tokens) // TOKEN_BYTES)
        if kv_part.oldest(match.pages, self._kv.weights) is not self._kv.weights:
            kv_part.cache.release(match.lease)
            return
        store = Store(tokens, namespace, match.pages, match.lease)
        self._stores.append((part, store))
        self.tier.store(store)

    def _go_on(self, loading: _Loading) -> None:
        """Give a load that was found its pages."""
        load, part = loading.load, self._kv.parts[loading.part]
        if load.num_found < 0 or load.pages or load.is_done:
            return
        match = part.cache.match(load.tokens, load.namespace, len(load.tokens) // TOKEN_BYTES)
        load.num_known = match.num_tokens // self._kv.page_size
        missing = load.num_found - load.num_known
        pages = part.grow(missing, self._kv.weights) if 0 < missing <= part.num_available_pages else None
        if pages is None:
            part.cache.release(match.lease)
            load.is_done = True
            return
        loading.lease, load.known_pages, load.pages = match.lease, match.pages, pages
        self.tier.load(load)

    def is_over(self, one: _Waiting, now_s: float) -> bool:
        """Whether a request has what it waited for, or would be done earlier without."""
        load, size = one.loading.load, self._kv.page_size
        if load.is_done or not load.is_wanted:
            return True
        waited_s = now_s - one.since_s
        count = (len(load.pages) or one.num_lacking) * size
        compute_s = self.prompt_seconds(load.num_known * size, count) or count * self._unknown_token_s
        num_left = len(load.pages) - max(0, load.num_loaded - load.num_known)
        page_s, opens_in_s = self.tier.seconds_per_page, self.tier.opens_in_s
        if opens_in_s:
            return waited_s + opens_in_s > compute_s
        if not load.pages or not page_s:
            return waited_s > FIRST_SHARE * compute_s
        return waited_s + num_left * page_s > compute_s

    def _enter(self, loading: _Loading) -> Lease | None:
        """Enter the pages of a load that is done in the tree. Returns the lease on them."""
        load, part, size = loading.load, self._kv.parts[loading.part], self._kv.page_size
        if not load.pages:
            return None
        num_new = max(0, load.num_loaded - load.num_known)
        lease = loading.lease
        part.give_back(load.pages[num_new:])
        if num_new:
            tokens = load.tokens[: load.num_loaded * size * TOKEN_BYTES]
            done = part.cache.insert(tokens, [*load.known_pages, *load.pages[:num_new]], load.namespace)
            num_twice = max(0, done.num_existing // size - load.num_known)
            part.give_back(load.pages[:num_twice])
            part.num_owned_pages -= num_new - num_twice
            part.cache.release(lease)
            lease = done.lease
        load.pages = []
        return lease

    def _release(self) -> None:
        """Let go of what was stored, and of what requests have taken up."""
        stored, self._stores = _divided(self._stores, lambda pair: pair[1].is_done or not pair[1].is_wanted)
        for part, store in stored:
            self._kv.parts[part].cache.release(store.lease)
        taken, self._held = _divided(self._held, lambda held: held[0].finish is not None or held[0].seq >= 0)
        for _, part, lease in taken:
            self._kv.parts[part].cache.release(lease)


def _serves(load: Load, tokens: bytes, namespace: str, num_known: int, page_size: int) -> bool:
    """Whether a load may bring pages that a prefix lacks."""
    end = (num_known + 1) * page_size * TOKEN_BYTES
    return (
        load.is_wanted and load.namespace == namespace and load.tokens[:end] == tokens[:end] and len(load.tokens) >= end
    )


def _divided(items: list[_T], is_first: Callable[[_T], bool]) -> tuple[list[_T], list[_T]]:
    """Those for which it is so, and the others."""
    first = [item for item in items if is_first(item)]
    return (first, [item for item in items if item not in first]) if first else (first, items)
