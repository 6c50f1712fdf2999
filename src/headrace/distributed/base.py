"""What a rank is to the layers, and how ranks talk to each other.

Ranks share each layer's weights (M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019): the first linear of a pair is split by outputs, the second by inputs, and the sum over ranks is the output. One rank,
the leader, has the scheduler; the others, the followers, run its plans.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from headrace.errors import ModelError


class Collectives(Protocol):
    """What the layers of all ranks exchange, where they run. Every rank makes the same calls in the same order; a call raises ExecutionError when
    the group is broken."""

    rank: int
    size: int

    @property
    def address(self) -> int | None:
        """The native group, for calls that reduce in the middle (`kernels.decoder`). None if there is none: then layers run one by one."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """x, contiguous, becomes the sum over the ranks, with the same bits in each. On a CPU x is float32, added in the order of ranks."""

    def gather(self, x: torch.Tensor, columns: Sequence[int], out: torch.Tensor | None) -> None:
        """x [rows, columns[rank]] of every rank, side by side in the leader's out float32[rows, sum(columns)]. out: None for followers. On a CPU
        x is float32."""


class Group(Collectives, Protocol):
    """The processes of all ranks of one model; on a CPU also what their layers exchange, in float32."""

    spans_hosts: bool
    """Whether ranks have their own host's files and clock."""

    def send(self, message: bytes) -> None:
        """A message of the leader to every follower."""

    def receive(self) -> bytes:
        """The next message of the leader; waits for it, as long as it takes."""

    def wait_for_ranks(self, limit_s: float, check: Callable[[], None]) -> None:
        """Wait in the leader until every rank of another host has joined. What `check` raises ends the wait."""

    def ready(self) -> None:
        """A follower can run steps."""

    def wait_ready(self, check: Callable[[], None]) -> None:
        """Wait in the leader for the `ready` of those that run on other hosts, however long it takes. What `check` raises ends the wait."""

    def failure(self) -> str | None:
        """Why the group is known to be broken; None = it is not. Also found between calls, if the ranks are on several hosts."""

    def break_up(self, reason: str) -> None:
        """End every call that waits, in every rank, and all later ones."""

    def close(self) -> None:
        """Let go of it. Idempotent."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that a rank has. group: None if it has the whole."""

    rank: int = 0
    size: int = 1
    group: Collectives | None = None

    @property
    def is_whole(self) -> bool:
        """Whether there are no other ranks."""
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this is the rank that samples."""
        return self.rank == 0

    def split(self, n: int, unit: int = 1) -> tuple[slice, ...]:
        """range(n) in a contiguous part for each rank: whole units (the last may be shorter), as even as they allow, the larger parts first.

        Raises ModelError if there are fewer units than ranks.
        """
        units = -(-n // unit)
        if units < self.size:
            raise ModelError(f"{n} cannot be split over {self.size} ranks in units of {unit}")
        sizes = [units // self.size + (rank < units % self.size) for rank in range(self.size)]
        ends = [min(n, end * unit) for end in accumulate(sizes)]
        return tuple(slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False))

    def part(self, n: int, unit: int = 1) -> slice:
        """This rank's part of `split`."""
        return self.split(n, unit)[self.rank]


WHOLE = Shard()
"""The whole model in one process."""


def length(part: slice) -> int:
    """Elements of a slice that `Shard.split` made."""
    return int(part.stop) - int(part.start)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Which attention heads a rank computes: whole groups of a KV head and its query heads, or a part of the query heads of one.

    query: heads whose output the rank computes. kv: KV heads that they read; where there are more ranks than KV heads, others have them, too.
    """

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
