"""Adapters in the form for the kernels: factors of one linear layer, and which rows of a step use which adapter.

Owns the data that `ops.lora_delta` takes. Made by `headrace.execution.lora`, used by the thread that runs the model.
"""

from dataclasses import dataclass

import torch

from headrace.kernels.packing import PackedLinear

Rows = slice | torch.Tensor
"""Rows of a matrix: a range, or their indices int64[n]."""


@dataclass(frozen=True, slots=True)
class LoraPart:
    """B of one projection, [columns, rank], with the scale in it. ranks: its part of A's output. columns: its part of the layer's output."""

    ranks: slice
    columns: slice
    b: PackedLinear


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """An adapter on one linear layer: the A of all its projections stacked, [sum of ranks, in_size], and their Bs."""

    a: PackedLinear
    parts: tuple[LoraPart, ...]


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Rows of a step by adapter; rows of the base model are in no group. num_rows: of the step.

    adapter_index: int32[num_rows] on the model's device, the adapter's number, 0 = base: for kernels that take all rows at once.
    """

    num_rows: int
    groups: tuple[tuple[int, Rows], ...]
    adapter_index: torch.Tensor
