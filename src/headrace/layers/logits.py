"""Computes logits from the last hidden state. Runs in the thread that runs the model."""

from collections.abc import Iterator

import torch

from headrace.distributed.base import WHOLE, Shard, length
from headrace.layers.embedding import VOCABULARY_UNIT
from headrace.layers.linear import Linear
from headrace.layers.weight import Weight


class LogitsHead:
    """Output projection and final soft cap.

    Every rank computes the logits of some ids; the leader gets all.

    soft_cap: logits become soft_cap * tanh(logits / soft_cap); 0.0 = as they are. tied: the weight is the embedding's, which
    loads it, so this layer has none.
    """

    def __init__(self, projection: Linear, *, soft_cap: float = 0.0, tied: bool = False, shard: Shard = WHOLE) -> None:
        self._projection = projection
        self._shard = shard
        self._sizes = [length(part) for part in shard.split(projection.num_outputs, VOCABULARY_UNIT)]
        self._soft_cap = soft_cap
        self._tied = tied

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32[rows, vocab_size]; for a follower, its part. out: see `CausalLM.logits`."""
        group = self._shard.group
        if group is None:
            logits = self._projection(hidden, out).float()
        else:
            own = self._projection(hidden)
            if not self._shard.leads:
                group.gather(own, self._sizes, None)
                return own
            logits = torch.empty(len(own), sum(self._sizes)) if out is None else out
            group.gather(own, self._sizes, logits)
        if self._soft_cap and logits.device.type != "cpu":
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        elif self._soft_cap:
            # Row by row: torch's vectorised tanh rounds the last elements of a call differently, and a row's bits must not depend
            # on how many rows there are.
            for row in logits:
                row.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits

    def weights(self, prefix: str) -> Iterator[Weight]:
        """`<prefix>lm_head.weight`, unless it is tied."""
        if not self._tied:
            yield from self._projection.weights(prefix)
