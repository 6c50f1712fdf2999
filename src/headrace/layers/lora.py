"""Adapters on a linear layer: adds their output for the rows of a step that use them.

Owns the factors of each adapter on one layer, and the current step's rows, which all layers share. Does not load adapters
(`headrace.execution.lora`). Used by the thread that runs the model; other threads add and remove entries, one at a time.
"""

from dataclasses import dataclass, field

import torch

from headrace import kernels
from headrace.kernels import LoraFactors, LoraRows


@dataclass(slots=True)
class LoraStep:
    """rows: of the current step; None if no row uses an adapter."""

    rows: LoraRows | None = None


@dataclass(slots=True)
class LinearAdapters:
    """by_id: factors of the adapters that target this layer."""

    step: LoraStep
    by_id: dict[int, LoraFactors] = field(default_factory=dict)

    def add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the adapters' output to the layer's output y [rows, n] for its input x [rows, k]."""
        if self.step.rows is not None:
            kernels.lora_delta(y, x, self.step.rows, self.by_id)
