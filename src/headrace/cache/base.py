"""Free pages, the interface of a prefix cache, the cache that shares nothing (--disable-radix-cache), and dicts that grow without a pause.

Used by the scheduler's thread.
"""

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, TypeVar

from headrace.messages.control import CacheNode
from headrace.messages.outputs import CacheMiss, MissReason

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(slots=True, eq=False)
class Weights:
    """Weights with which KV was computed. number: of the updates before them. name: their version."""

    number: int = 0
    name: str = "default"


class Lease:
    """A pin on a cached prefix: while it is held, its pages are not evicted. Issued and released by the cache."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A cached prefix: `num_tokens` tokens in `pages`, of a cache a multiple of page_size. `lease` is held until released."""

    num_tokens: int
    pages: list[int] = field(default_factory=list)
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class Insertion:
    """What the cache did with an offered prefix, in tokens.

    [0, num_existing)         already cached; offered pages of this range that are not the cache's stay the caller's
    [num_existing, num_kept)  now cached; the cache owns their pages
    [num_kept, ...)           not cached; their pages stay the caller's
    lease: pin on [0, num_kept), held until released.
    """

    num_existing: int
    num_kept: int
    lease: Lease | None = None


class CacheObserver(Protocol):
    """Told by a `RadixCache` what changes. A page is in the tree at most once."""

    def stored(self, tokens: bytes, pages: list[int], after: int | None, namespace: str) -> None:
        """The tree has new pages with these tokens, int32 bytes. after: the page before the first; None = they begin a prompt."""

    def removed(self, pages: list[int]) -> None:
        """The tree no longer has these pages."""

    def cleared(self) -> None:
        """The tree is empty."""


class PrefixCache(Protocol):
    """Cached prefixes and their pages. Tokens are int32 little-endian bytes, so that comparing is one memcmp."""

    shares: bool
    """False when nothing is ever found, so that there is no point in waiting for another request's prefix."""

    @property
    def num_evictable_pages(self) -> int:
        """Number of pages that `evict` could free now."""

    @property
    def num_leased_pages(self) -> int:
        """Number of cached pages pinned by leases."""

    def peek(self, tokens: bytes, namespace: str, limit: int) -> int:
        """Length in tokens of the longest cached prefix of tokens[:limit]. Changes nothing."""

    def match(self, tokens: bytes, namespace: str, limit: int) -> PrefixMatch:
        """Longest cached prefix of tokens[:limit], pinned. An empty match is normal."""

    def insert(self, tokens: bytes, pages: list[int], namespace: str) -> Insertion:
        """Add the KV of `tokens` to the cache and pin it. Only whole pages are taken, not a partial last page."""

    def release(self, lease: Lease | None) -> None:
        """Release a lease; None is accepted."""

    def evict(self, num_pages: int) -> list[int]:
        """Evict least recently used prefixes until at least `num_pages` pages are freed or nothing is left to evict. Returns the pages."""

    def take_oldest(self, num_pages: int) -> list[tuple[bytes, str]]:
        """Tokens and namespaces of the prefixes that the next `num_pages` pages to be evicted belong to, without those that it has given before. If
        that is all: also of those that are leased."""

    def flush(self, why: MissReason = "flushed") -> list[int]:
        """Evict everything; no lease may be held. Returns the freed pages. why: see `explain`."""

    def explain(self, tokens: bytes, namespace: str, limit: int) -> CacheMiss | None:
        """Why no more of tokens[:limit] is cached; None if all whole pages are. Changes nothing."""

    def num_pages_of(self, owner: str | None) -> int:
        """Number of cached pages of an API key (`namespaces.owner_of`); None: of those without one."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the tree."""

    def outline(self, max_depth: int, max_nodes: int) -> list[CacheNode]:
        """The tree from the top, level by level, and in a level those first that were added last (of thousands, nearly). Takes time for what is
        listed only."""


class PageAllocator:
    """Pages first .. first + num_pages - 1 of `page_size` tokens each; slot of a token = page * page_size + offset."""

    def __init__(self, num_pages: int, page_size: int, first: int = 0) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.first = first
        self._free = self._all()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Take `num_pages` pages from the free list. The caller has checked `num_free`."""
        assert 0 <= num_pages <= len(self._free), (num_pages, len(self._free))
        if num_pages == 0:
            return []
        taken = self._free[-num_pages:]
        del self._free[-num_pages:]
        taken.reverse()
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. A page that is freed twice is noticed by the accounting, not here."""
        self._free.extend(pages)
        assert len(self._free) <= self.num_pages, (len(self._free), self.num_pages)

    def reset(self) -> None:
        self._free = self._all()

    def _all(self) -> list[int]:
        # Popped from the end: low pages first, so that a lightly used pool touches little memory.
        return list(range(self.first + self.num_pages - 1, self.first - 1, -1))


class Parted(MutableMapping[_K, _V]):
    """A dict in parts, since one of many entries takes milliseconds when it grows: after `MOST_TOGETHER` entries there are `_PARTS`, by the hash."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[dict[_K, _V]] = [{}]

    def __getitem__(self, key: _K) -> _V:
        return self._part(key)[key]

    def __setitem__(self, key: _K, value: _V) -> None:
        self._part(key)[key] = value
        if len(self._parts) == 1 and len(self._parts[0]) > MOST_TOGETHER:
            together, self._parts = self._parts[0], [{} for _ in range(_PARTS)]
            self.update(together)

    def __delitem__(self, key: _K) -> None:
        del self._part(key)[key]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[_K]:
        return chain.from_iterable(self._parts)

    def clear(self) -> None:
        self._parts = [{}]

    def latest(self) -> Iterator[_V]:
        """The values, those that were added last first; of several parts, of each."""
        return chain.from_iterable(reversed(part.values()) for part in self._parts)

    def _part(self, key: _K) -> dict[_K, _V]:
        return self._parts[hash(key) % len(self._parts)]


MOST_TOGETHER, _PARTS = 1 << 10, 1 << 6


class ChunkCache:
    """A `PrefixCache` that is always empty."""

    shares = False
    num_evictable_pages = 0
    num_leased_pages = 0
    num_nodes = 0

    def peek(self, tokens: bytes, namespace: str, limit: int) -> int:
        return 0

    def match(self, tokens: bytes, namespace: str, limit: int) -> PrefixMatch:
        return PrefixMatch(0)

    def insert(self, tokens: bytes, pages: list[int], namespace: str) -> Insertion:
        return Insertion(0, 0)

    def release(self, lease: Lease | None) -> None:
        """Nothing is ever pinned."""

    def evict(self, num_pages: int) -> list[int]:
        return []

    def take_oldest(self, num_pages: int) -> list[tuple[bytes, str]]:
        return []

    def flush(self, why: MissReason = "flushed") -> list[int]:
        return []

    def explain(self, tokens: bytes, namespace: str, limit: int) -> CacheMiss | None:
        return None

    def num_pages_of(self, owner: str | None) -> int:
        return 0

    def outline(self, max_depth: int, max_nodes: int) -> list[CacheNode]:
        return []
