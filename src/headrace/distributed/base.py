"""What a rank is to the model: its part of each layer (`Shard`), its layers (`Stage`); and how ranks talk to each other.

Ranks share each layer's weights (M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019): the first linear of a pair is split by outputs, the second by inputs, and the sum over ranks is the output. One rank,
the leader, has the scheduler; the others, the followers, run its plans.

A model's layers are cut into runs, a stage each (Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", 2019). The first stage, which is the leader's, has the embedding and also the output projection: the last one sends what comes
out of its layers back, so that sampling stays in one place and a tied table lies in one process.

    first stage      embed, layers | send ........................... | receive, logits, sample
    others               receive, layers | send
    last stage                     receive, layers, final norm | send
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
        """End every call that waits, in every rank, and all later ones. The first reason stays."""

    def close(self) -> None:
        """Let go of it. Idempotent."""


HALVES_FROM = 16
"""Tokens of a step from which halves are worth it: with fewer, a step takes as long as reading the weights, and halves read them twice."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that a rank has. group: None if it has the whole. halves_from: given, in a step of so many tokens each half is computed
    while the ranks sum the other's (SGLang's two-batch overlap, as in DeepSeek-V3's serving)."""

    rank: int = 0
    size: int = 1
    group: Collectives | None = None
    halves_from: int = 0

    @property
    def is_whole(self) -> bool:
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
        return self.split(n, unit)[self.rank]


def check_sum(x: torch.Tensor) -> None:
    """ValueError unless ranks can sum it on a CPU."""
    if not x.is_contiguous():
        raise ValueError(f"all_reduce: strides {x.stride()} of a tensor {list(x.shape)} that is not contiguous")
    check_floats(x)


def check_rows(x: torch.Tensor, rows: int, columns: int) -> None:
    """ValueError unless ranks can gather it on a CPU: float32[rows, columns], whose rows may lie apart."""
    if x.shape != (rows, columns) or (columns > 1 and x.stride(1) != 1):
        raise ValueError(
            f"gather: a tensor {list(x.shape)} with strides {x.stride()} for {rows} rows of {columns} columns"
        )
    check_floats(x)


def check_floats(x: torch.Tensor) -> None:
    """ValueError unless x is what ranks exchange."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"ranks exchange float32 on the CPU, not {x.dtype} on {x.device}")


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
        return length(self.query)

    @property
    def num_kv(self) -> int:
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


class Sender(Protocol):
    """To the rank of the next stage that has the same part of its layers."""

    def send(self, hidden: torch.Tensor) -> None:
        """hidden float32[rows, hidden_size], contiguous, on the CPU; nobody may write to it afterwards. Never waits for the receiver.

        Raises ExecutionError when the receiver is gone.
        """

    def close(self) -> None:
        """Let go of it. Idempotent."""


class Receiver(Protocol):
    """From the rank of the stage before that has the same part of its layers."""

    def receive(self, rows: int) -> torch.Tensor:
        """What was sent next, float32[rows, hidden_size]. Raises ExecutionError when the sender is gone, or has stopped."""

    def close(self) -> None:
        """Let go of it. Idempotent."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers that a process has. before, after: from the stage before it and to the one after it; None if it has all layers.

    The stages are a ring: before the first comes the last.
    """

    index: int = 0
    count: int = 1
    before: Receiver | None = None
    after: Sender | None = None

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens and computes logits."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the last layer, and the final norm."""
        return self.index == self.count - 1

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    @property
    def others(self) -> list["Stage"]:
        """The other stages, as this process knows them: without links."""
        return [Stage(index, self.count) for index in range(self.count) if index != self.index]

    def split(self, num_layers: int, head_layers: float) -> tuple[range, ...]:
        """The layers of each stage. head_layers: how many layers the output projection, which the first stage has too, counts for.

        Every stage has a layer at least. Raises ModelError if there are fewer layers than stages.
        """
        if num_layers < self.count:
            raise ModelError(f"{num_layers} layers cannot be split over {self.count} stages")
        if self.count == 1:
            return (range(num_layers),)
        fair = (num_layers + head_layers) / self.count - head_layers
        first = min(max(1, round(fair)), num_layers - (self.count - 1))
        others = Shard(size=self.count - 1).split(num_layers - first)
        return range(first), *(range(first + part.start, first + part.stop) for part in others)


ALL_LAYERS = Stage()
"""Every layer, in one process."""
