"""Counts how many tokens the router of a layer sends to each expert, while recording is on.

Runs in the thread that runs the model.
"""

import torch


class ExpertCounts:
    """The counts of one layer. While recording is off, it costs one comparison per step."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._counts: torch.Tensor | None = None
        self._kept = [0] * num_experts

    def start(self, device: torch.device) -> None:
        """Start counting from zero."""
        self._counts = torch.zeros(self._num_experts, dtype=torch.int64, device=device)
        self._kept = [0] * self._num_experts

    def stop(self) -> None:
        """Stop counting; `take` still returns the counts."""
        if self._counts is not None:
            self._kept = self.take()
            self._counts = None

    def take(self) -> list[int]:
        """Return the tokens per expert, and reset them."""
        if self._counts is not None:
            taken: list[int] = self._counts.tolist()
            self._counts.zero_()
            return taken
        taken, self._kept = self._kept, [0] * self._num_experts
        return taken

    @property
    def is_on(self) -> bool:
        """Whether it counts."""
        return self._counts is not None

    def add(self, chosen: torch.Tensor) -> None:
        """chosen: int64[rows, experts of a row]."""
        if self._counts is not None:
            experts = chosen.flatten()
            self._counts.index_add_(0, experts, torch.ones_like(experts))
