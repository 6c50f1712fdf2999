"""What becomes of the hidden states of a text: one vector, or a number for each label. Runs in the thread that runs the model.

On the CPU the bits of a text do not depend on the other texts: whatever is not one of the kernels is computed text by text, since torch's
vectorised functions round the last elements of a call differently.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

import torch

from headrace.checkpoint.pooling import PoolingConfig
from headrace.layers.linear import Linear
from headrace.layers.weight import NamedLayer, Placement, Weight

Activation = Literal["identity", "tanh", "relu", "gelu", "silu"]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
_SMALLEST_LENGTH = 1e-12
"""A vector is divided by its length, or by this if it is shorter (as torch's `normalize`)."""


class HeadLinear:
    """activation(x @ W^T + b), never quantised: it is small, and decides. name: the last part of its Hugging Face name."""

    def __init__(
        self,
        name: str,
        in_size: int,
        out_size: int,
        placement: Placement,
        *,
        bias: bool = True,
        activation: Activation = "identity",
    ) -> None:
        self._linear = Linear(in_size, {name: out_size}, placement.unquantized, bias=bias)
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._linear(x)
        return y if self._activation == "identity" else _each_row(_ACTIVATIONS[self._activation], y)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self._linear.weights(prefix)


class Pooler:
    """Pooling, the head of the family or the Dense modules, and the length. head: layers between the pooled hidden state and the numbers of a
    classifier, in order; None for an embedding."""

    def __init__(
        self, config: PoolingConfig, hidden_size: int, placement: Placement, head: Sequence[NamedLayer] = ()
    ) -> None:
        assert bool(head) == (config.task == "classify"), config
        self.config = config
        self._layers = list(head)
        for one in config.dense:
            sizes = one.in_features, one.out_features
            layer = HeadLinear("linear", *sizes, placement, bias=one.bias, activation=one.activation)
            self._layers.append((layer, f"{one.folder}."))

    def weights(self) -> Iterator[Weight]:
        for layer, prefix in self._layers:
            yield from layer.weights(prefix)

    def __call__(self, hidden: torch.Tensor, starts: list[int]) -> torch.Tensor:
        """hidden [num_read, hidden_size] -> float32[num_rows, dimensions], for a classifier its numbers before `config.activation`.

        Row r has tokens starts[r] .. starts[r + 1] - 1 of `hidden`, at least one; for `last` only the last need be there.
        """
        rows = [self._pooled(hidden[start:end]) for start, end in pairwise(starts)]
        if not rows:
            return torch.empty(0, self.config.dimensions, device=hidden.device)
        x = torch.stack(rows)
        if self._layers:
            x = x.to(hidden.dtype)
        for layer, _ in self._layers:
            x = layer(x)
        x = x.float()
        return _each_row(_unit_length, x) if self.config.normalize else x

    def _pooled(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [tokens, hidden_size] of one text -> float32[hidden_size]."""
        match self.config.pooling:
            case "cls":
                return hidden[0].float()
            case "last":
                return hidden[-1].float()
            case "mean":
                return hidden.float().mean(dim=0)


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm().clamp_min(_SMALLEST_LENGTH)


def _each_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.stack([function(row) for row in x])
