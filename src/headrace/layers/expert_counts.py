"""How many tokens the router of a layer sent to each expert, counted while somebody wants to know.

Runs in the thread that runs the model.
"""

import torch


class ExpertCounts:
    """Of one layer. While it does not count it costs one comparison a step."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._counts: torch.Tensor | None = None
        self._kept = [0] * num_experts

    def start(self, device: torch.device) -> None:
        """Count from zero."""
        self._counts = torch.zeros(self._num_experts, dtype=torch.int64, device=device)
        self._kept = [0] * self._num_experts

    def stop(self) -> None:
        """Count no more; `take` still gives what there is."""
        if self._counts is not None:
            self._kept = self.take()
            self._counts = None

    def take(self) -> list[int]:
        """Tokens by expert, which begin again at zero."""
        if self._counts is not None:
            taken: list[int] = self._counts.tolist()
            self._counts.zero_()
            return taken
        taken, self._kept = self._kept, [0] * self._num_experts
        return taken

    def add(self, chosen: torch.Tensor) -> None:
        """chosen: int64[rows, experts of a row]."""
        if self._counts is not None:
            experts = chosen.flatten()
            self._counts.index_add_(0, experts, torch.ones_like(experts))
