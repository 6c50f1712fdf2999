"""Which attention heads a rank computes: whole groups of a KV head and its query heads, or a part of the query heads of one."""

from dataclasses import dataclass

from headrace.distributed.base import Shard, length


@dataclass(frozen=True, slots=True)
class HeadShare:
    """query: heads whose output the rank computes. kv: KV heads that they read; where there are more ranks than KV heads, others have them, too."""

    query: slice
    kv: slice

    @property
    def num_query(self) -> int:
        """Query heads of the rank."""
        return length(self.query)

    @property
    def num_kv(self) -> int:
        """KV heads of the rank."""
        return length(self.kv)


def head_share(shard: Shard, num_query: int, num_kv: int) -> HeadShare:
    """The heads of a rank. num_query is a multiple of num_kv. Raises ModelError if there are more ranks than query heads."""
    per_kv = num_query // num_kv
    if num_kv >= shard.size:
        kv = shard.part(num_kv)
        return HeadShare(slice(kv.start * per_kv, kv.stop * per_kv), kv)
    # Ranks are dealt to the KV heads, and those of one KV head share its query heads.
    ranks_of = Shard(size=num_kv).split(shard.size)
    head = next(index for index, ranks in enumerate(ranks_of) if ranks.start <= shard.rank < ranks.stop)
    ranks = ranks_of[head]
    own = Shard(shard.rank - ranks.start, length(ranks)).part(per_kv)
    return HeadShare(slice(head * per_kv + own.start, head * per_kv + own.stop), slice(head, head + 1))
