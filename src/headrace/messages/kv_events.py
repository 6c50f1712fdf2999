"""What changes in a scheduler's prefix cache, as vLLM's and SGLang's routers read it: each event is a map with a `type`.

A block is a page of the KV cache: `block_size` tokens. Its hash stands for its tokens, all tokens before them, and their namespace. It is a
signed integer of 64 bits.
"""

import msgspec


class _Event(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of events."""


class BlockStored(_Event, frozen=True, tag=True, gc=False):
    """Blocks that follow one another are cached now.

    parent_block_hash: of the block before the first; None = they begin a prompt. token_ids: of all blocks, block_size for each.
    lora_id, lora_name: of the adapter; None = the base model. medium: None = the memory that the model computes in, the only one.
    cache_salt, extra_key, key_name: what else the KV is kept apart by: two fields of requests, and the name of an API key.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    key_name: str | None = None


class BlockRemoved(_Event, frozen=True, tag=True, gc=False):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(_Event, frozen=True, tag=True, gc=False):
    """Nothing is cached now."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The events of one turn of a scheduler, in order. ts: seconds since 1970."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int
