"""The weights of a mixture of experts in the form of one op.

Owns `PackedExperts`. Does not own packing a weight (`packing`) or the op. Made when the model is loaded or first run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from headrace.kernels.packing import QUANT_SCHEMES, PackedLinear

_FLOAT_FORMATS = {"native_f32": -2, "native_bf16": -1}


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Packed weights by expert: gate_up [2 * intermediate_size, hidden_size], gate first, and down [hidden_size, intermediate_size].

    table: of native layouts int64[num_experts, 2, 5], csrc/cpu/ops.h's ExpertWeight of each; of layout torch int64[num_experts, 2], their
    addresses, on their device; else None. The addresses are those of the tensors kept here: after weights are reloaded, a new one is needed.
    """

    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]
    activation: Literal["silu", "gelu_tanh"]
    table: torch.Tensor | None

    @property
    def hidden_size(self) -> int:
        """Elements of an input row and of an output row."""
        return self.gate_up[0].k

    @property
    def intermediate_size(self) -> int:
        """Elements of a row between the two products."""
        return self.down[0].k


def pack_experts(
    gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: Literal["silu", "gelu_tanh"]
) -> PackedExperts:
    """Experts 0, 1, ... for `ops.moe`; no copy is made. The layouts may differ as long as one implementation reads them all.

    ValueError when there are none, or sizes or implementations differ.
    """
    if not gate_up or len(gate_up) != len(down):
        raise ValueError(f"moe: {len(gate_up)} gate_up weights and {len(down)} down weights")
    hidden, intermediate = gate_up[0].k, down[0].k
    every = [*gate_up, *down]
    is_native = not every[0].layout.startswith("torch")
    for up, out in zip(gate_up, down, strict=True):
        if (up.n, up.k, out.n, out.k) != (2 * intermediate, hidden, hidden, intermediate):
            raise ValueError(
                f"moe: experts of [{up.n}, {up.k}] and [{out.n}, {out.k}] beside {hidden} and {intermediate}"
            )
    if any(weight.layout.startswith("torch") == is_native for weight in every):
        raise ValueError(f"moe: layouts {sorted({weight.layout for weight in every})} do not go together")
    table = None
    if is_native:
        table = torch.tensor([[_row(up), _row(out)] for up, out in zip(gate_up, down, strict=True)], dtype=torch.int64)
    elif all(weight.layout == "torch" for weight in every):
        addresses = [[up.data.data_ptr(), out.data.data_ptr()] for up, out in zip(gate_up, down, strict=True)]
        table = torch.tensor(addresses, dtype=torch.int64, device=every[0].data.device)
    return PackedExperts(tuple(gate_up), tuple(down), activation, table)


def _row(packed: PackedLinear) -> list[int]:
    data = packed.data
    return [
        data.data_ptr(),
        data.numel() * data.element_size() // data.shape[0],
        QUANT_SCHEMES.get(packed.layout, _FLOAT_FORMATS.get(packed.layout, 0)),
        0 if packed.column_scales is None else packed.column_scales.data_ptr(),
        0 if packed.bias is None else packed.bias.data_ptr(),
    ]
