"""The latest batches of KV events, and what was cached before them: any subscriber can be told what is cached now.

Owns the replay buffer. Knows no sockets. Used in the publisher's thread only.
"""

from collections import deque
from collections.abc import Iterator

import msgspec

from headrace.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch


class KVEventHistory:
    """See the module docstring. max_batches: how many batches are kept as they were sent, at least 1."""

    def __init__(self, max_batches: int) -> None:
        self._max_batches = max_batches
        self._batches: deque[tuple[int, KVEventBatch, bytes]] = deque()
        self._encode = msgspec.msgpack.Encoder().encode
        # The blocks that were cached before the oldest batch; a block comes after the one before it.
        self._before: dict[int, BlockStored] = {}

    def add(self, sequence: int, batch: KVEventBatch) -> bytes:
        """Keep a batch, whose number is above all others. Returns it as msgpack."""
        payload = self._encode(batch)
        self._batches.append((sequence, batch, payload))
        if len(self._batches) > self._max_batches:
            for event in self._batches.popleft()[1].events:
                self._apply(event)
        return payload

    def since(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """(number, msgpack) of the batches from `sequence` on.

        When older ones are asked for than are kept, one batch takes their place: all is cleared, then what was cached is stored. It has
        the number of the last of them.
        """
        if not self._batches:
            return
        oldest, first, _ = self._batches[0]
        if sequence < oldest:
            events: list[KVEvent] = [AllBlocksCleared(), *self._before.values()]
            yield oldest - 1, self._encode(KVEventBatch(first.ts, events, first.data_parallel_rank))
        for number, _, payload in self._batches:
            if number >= sequence:
                yield number, payload

    def _apply(self, event: KVEvent) -> None:
        match event:
            case BlockStored():
                parent, size = event.parent_block_hash, event.block_size
                for index, one in enumerate(event.block_hashes):
                    tokens = event.token_ids[index * size : (index + 1) * size]
                    self._before[one] = msgspec.structs.replace(
                        event, block_hashes=[one], parent_block_hash=parent, token_ids=tokens
                    )
                    parent = one
            case BlockRemoved():
                for one in event.block_hashes:
                    self._before.pop(one, None)  # the event that stored it may be lost
            case AllBlocksCleared():
                self._before.clear()
