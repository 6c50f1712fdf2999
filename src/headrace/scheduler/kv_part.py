"""A part of the KV cache: pages that only the sequences of one rank use, or the pages of all. Runs in the scheduler's thread."""

from dataclasses import dataclass

from headrace.cache.allocator import PageAllocator
from headrace.cache.base import PrefixCache


@dataclass(slots=True)
class KvPart:
    """Free pages, cached prefixes, and the number of pages that requests own.

    Invariant, in pages: free + evictable + leased-in-cache + owned by requests == total.
    """

    allocator: PageAllocator
    cache: PrefixCache
    num_owned_pages: int = 0

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
        """Whether the invariant holds."""
        return self.num_available_pages + self.num_leased_pages == self.allocator.num_pages

    def grow(self, num_pages: int) -> list[int] | None:
        """Allocate this many pages for a request, evicting if needed. None: there is no room, and nothing has changed."""
        short = num_pages - self.allocator.num_free
        if short > 0:
            if short > self.cache.num_evictable_pages:
                return None
            # Evict a little more than needed, so that a full pool does not evict at every step.
            self.allocator.free(self.cache.evict(max(short, self.allocator.num_pages // 64)))
        self.num_owned_pages += num_pages
        return self.allocator.allocate(num_pages)

    def give_back(self, pages: list[int]) -> None:
        """Free pages that a request owned."""
        self.allocator.free(pages)
        self.num_owned_pages -= len(pages)

    def flush(self) -> None:
        """Empty the cache. No request may hold a lease."""
        self.allocator.free(self.cache.flush())

    def repair(self) -> None:
        """Reset to an empty pool."""
        self.cache.flush()
        self.allocator.reset()
        self.num_owned_pages = 0
