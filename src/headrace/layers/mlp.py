"""Gated feed-forward layer (N. Shazeer, "GLU Variants Improve Transformer", 2020). Runs in the thread that runs the model."""

from collections.abc import Iterator
from typing import Literal

import torch

from headrace import kernels
from headrace.checkpoint.weight_formats import KERNEL_GROUP, WIDE_GROUP
from headrace.errors import ModelError
from headrace.layers.linear import Linear
from headrace.layers.weight import Placement, Weight

Activation = Literal["silu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_GATES = {"silu": kernels.silu_mul, "gelu_tanh": kernels.gelu_tanh_mul}


class GatedMlp:
    """down(act(gate(x)) * up(x)).

    act: Hugging Face name of the activation; ModelError for one that is not known.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, act: str, placement: Placement, *, bias: bool = False
    ) -> None:
        if act not in _ACTIVATIONS:
            raise ModelError(f"activation {act!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
        self.activation = _ACTIVATIONS[act]
        self._gate = _GATES[self.activation]
        sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        own = _own_part(intermediate_size, placement)
        self.gate_up = Linear(hidden_size, sizes, placement, bias=bias, own_outputs=dict.fromkeys(sizes, own))
        self.down = Linear(
            intermediate_size,
            {"down_proj": hidden_size},
            placement,
            bias=bias,
            own_inputs=None if placement.shard.is_whole else own,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden_size] -> [rows, hidden_size]."""
        return self.down(self._gate(self.gate_up(x)))

    def weights(self, prefix: str) -> Iterator[Weight]:
        """`<prefix>.gate_proj`, `.up_proj`, `.down_proj`."""
        yield from self.gate_up.weights(f"{prefix}.")
        yield from self.down.weights(f"{prefix}.")


def _own_part(intermediate_size: int, placement: Placement) -> slice:
    """The part of the layer that this rank computes: whole blocks of what formats scale or rotate together, if there are enough of them."""
    shard = placement.shard
    unit = next((size for size in (WIDE_GROUP, KERNEL_GROUP) if intermediate_size >= size * shard.size), 1)
    return shard.part(intermediate_size, unit)
