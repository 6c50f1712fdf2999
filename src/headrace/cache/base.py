"""What the scheduler asks of a prefix cache; `RadixCache` and `ChunkCache` answer."""

from dataclasses import dataclass, field
from typing import Protocol


class Lease:
    """A pin on a cached prefix. While it is held, its pages are not evicted. Given out and taken back by the cache."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A cached prefix: `num_tokens` tokens (a multiple of page_size) in `pages`. `lease` is held until released."""

    num_tokens: int
    pages: list[int] = field(default_factory=list)
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class Insertion:
    """What the cache did with an offered prefix, in tokens.

    [0, num_existing)         it had these already; the offered pages of this range that are not its own stay the caller's
    [num_existing, num_kept)  now the cache's, pages included
    [num_kept, ...)           not taken; stays the caller's
    lease: pin on [0, num_kept), held until released.
    """

    num_existing: int
    num_kept: int
    lease: Lease | None = None


class PrefixCache(Protocol):
    """Known prefixes and their pages. Tokens are int32 little-endian bytes: comparing is one memcmp."""

    shares: bool
    """False when nothing is ever found: waiting for another request's prefix would be in vain."""

    @property
    def num_evictable_pages(self) -> int:
        """Pages that `evict` could free now."""

    @property
    def num_leased_pages(self) -> int:
        """Pages of the cache pinned by leases."""

    def peek(self, tokens: bytes, namespace: str, limit: int) -> int:
        """Length in tokens of the longest cached prefix of tokens[:limit]. Changes nothing."""

    def match(self, tokens: bytes, namespace: str, limit: int) -> PrefixMatch:
        """Longest cached prefix of tokens[:limit], pinned. An empty match is normal."""

    def insert(self, tokens: bytes, pages: list[int], namespace: str) -> Insertion:
        """Offer the KV of `tokens` (whole pages count; a partial last page is not taken), pinned."""

    def release(self, lease: Lease | None) -> None:
        """Give a lease back; None is accepted."""

    def evict(self, num_pages: int) -> list[int]:
        """Forget least recently used prefixes until `num_pages` pages or more are freed, or nothing more can be."""

    def flush(self) -> list[int]:
        """Forget everything. The caller holds no lease. Returns the freed pages."""
