"""What a stage of a pipeline is to the model, and what stages say to each other.

A model's layers are cut into runs, a stage each (Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", 2019). The first stage, which is the leader's, has the embedding and also the output projection: the last one sends what comes
out of its layers back, so that sampling stays in one place and a tied table lies in one process.

    first stage      embed, layers | send ........................... | receive, logits, sample
    others               receive, layers | send
    last stage                     receive, layers, final norm | send
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.distributed.base import Shard
from headrace.errors import ModelError


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
        """Whether there are no other stages."""
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
