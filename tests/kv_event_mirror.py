"""What a router knows from KV events, and what is cached in truth."""

import msgspec

from headrace.cache.radix_cache import RadixCache
from headrace.messages import namespaces
from headrace.messages.kv_events import KVEvent
from headrace.messages.packing import unpack_int32

Block = tuple[namespaces.NamespaceParts, tuple[int, ...]]
"""Namespace, and all tokens from the beginning of the prompt to the end of the block."""


class Mirror:
    """The blocks that events tell of, by their hashes."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}

    def apply(self, events: list[KVEvent] | list[dict]) -> None:
        """Events as structs, or as the maps that come over the wire."""
        for event in msgspec.to_builtins(events):
            match event["type"]:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    for block in event["block_hashes"]:
                        del self.blocks[block]
                case "AllBlocksCleared":
                    self.blocks.clear()

    def _store(self, event: dict) -> None:
        names = ("extra_key", "cache_salt", "key_name", "lora_id", "lora_name")
        parts = namespaces.NamespaceParts(*(event[name] for name in names))
        tokens: tuple[int, ...] = ()
        if event["parent_block_hash"] is not None:
            its_parts, tokens = self.blocks[event["parent_block_hash"]]
            assert its_parts == parts
        size = event["block_size"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for index, block in enumerate(event["block_hashes"]):
            tokens += tuple(event["token_ids"][index * size : (index + 1) * size])
            assert block not in self.blocks
            self.blocks[block] = (parts, tokens)

    def known(self) -> set[Block]:
        blocks = set(self.blocks.values())
        assert len(blocks) == len(self.blocks), "two hashes for one block"
        return blocks


def cached(cache: RadixCache) -> set[Block]:
    """The blocks of the tree."""
    found = set()
    for namespace, root in cache._roots.items():
        parts = namespaces.read(namespace)
        level = [((), node) for node in root.children.values()]
        while level:
            before, node = level.pop()
            tokens = before + tuple(unpack_int32(node.key))
            ends = range(len(before) + cache.page_size, len(tokens) + 1, cache.page_size)
            found |= {(parts, tokens[:end]) for end in ends}
            level += [(tokens, child) for child in node.children.values()]
    return found
