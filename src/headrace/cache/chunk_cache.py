"""A cache that shares nothing (--disable-radix-cache): every request owns and frees its own pages."""

from headrace.cache.base import Insertion, Lease, PrefixMatch
from headrace.messages.control import CacheNode


class ChunkCache:
    """A `PrefixCache` that is always empty."""

    shares = False
    num_evictable_pages = 0
    num_leased_pages = 0
    num_nodes = 0

    def peek(self, tokens: bytes, namespace: str, limit: int) -> int:
        """Always 0."""
        return 0

    def match(self, tokens: bytes, namespace: str, limit: int) -> PrefixMatch:
        """Always empty."""
        return PrefixMatch(0)

    def insert(self, tokens: bytes, pages: list[int], namespace: str) -> Insertion:
        """Keeps nothing."""
        return Insertion(0, 0)

    def release(self, lease: Lease | None) -> None:
        """Nothing is ever pinned."""

    def evict(self, num_pages: int) -> list[int]:
        """Nothing to forget."""
        return []

    def flush(self) -> list[int]:
        """Nothing to forget."""
        return []

    def outline(self, max_depth: int, max_nodes: int) -> list[CacheNode]:
        """There is no tree."""
        return []
