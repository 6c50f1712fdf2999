"""What the tree of prefixes stores and evicts, as events for routers (--kv-events-config).

Owns the hash of each cached page. Does not own the tree, which tells it (`CacheObserver`), nor sending. Runs in the scheduler's thread.
"""

import hashlib

from headrace.cache.base import Parted
from headrace.messages import namespaces
from headrace.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from headrace.messages.packing import unpack_int32

HASH_BYTES = 8


class BlockEvents:
    """A `CacheObserver` that keeps events until they are taken. The first says that nothing is cached.

    Several trees may tell it, of pages with different numbers: a block is stored when the first has it, and removed when none has it any more.
    The hash of a block is BLAKE2b, 8 bytes, over the hash of the block before it (of the namespace, for the first) and its tokens. So it
    is the same in every replica and after a restart.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._page_bytes = page_size * 4
        self._hash_of_page: Parted[int, bytes] = Parted()
        self._num_pages_of: Parted[bytes, int] = Parted()
        self._events: list[KVEvent] = [AllBlocksCleared()]

    def take(self) -> list[KVEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def stored(self, tokens: bytes, pages: list[int], after: int | None, namespace: str) -> None:
        last = parent = _hash(namespace.encode()) if after is None else self._hash_of_page[after]
        hashes: list[int] = []
        num_known = 0
        for index, page in enumerate(pages):
            last = _hash(last + tokens[index * self._page_bytes : (index + 1) * self._page_bytes])
            self._hash_of_page[page] = last
            self._num_pages_of[last] = self._num_pages_of.get(last, 0) + 1
            if self._num_pages_of[last] == 1:
                hashes.append(_number(last))
            else:  # so another tree has all blocks before it, too
                num_known, parent = index + 1, last
        if not hashes:
            return
        parts = namespaces.read(namespace)
        self._events.append(
            BlockStored(
                hashes,
                None if after is None and not num_known else _number(parent),
                unpack_int32(tokens[num_known * self._page_bytes :]),
                self._page_size,
                lora_id=parts.lora_id,
                lora_name=parts.lora_name,
                cache_salt=parts.cache_salt,
                extra_key=parts.extra_key,
                key_name=parts.key_name,
            )
        )

    def removed(self, pages: list[int]) -> None:
        gone = []
        for digest in map(self._hash_of_page.pop, pages):
            self._num_pages_of[digest] -= 1
            if not self._num_pages_of[digest]:
                del self._num_pages_of[digest]
                gone.append(_number(digest))
        if gone:
            self._events.append(BlockRemoved(gone))

    def cleared(self) -> None:
        """See `CacheObserver`. What was stored and evicted before and not taken yet no longer matters."""
        self._hash_of_page.clear()
        self._num_pages_of.clear()
        self._events = [AllBlocksCleared()]


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little", signed=True)
