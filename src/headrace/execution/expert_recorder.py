"""Counts which experts a mixture's routers choose, per layer.

Used by the thread that runs the steps, between two steps.
"""

from collections.abc import Mapping

import torch

from headrace.errors import RequestError
from headrace.layers.expert_counts import ExpertCounts
from headrace.messages.experts import ExpertCountsReply, ExpertCountsReq


class ExpertRecorder:
    """counts: by layer; empty = not available. refusal: why nothing can be recorded; "" if it can."""

    def __init__(self, counts: Mapping[int, ExpertCounts], device: torch.device, refusal: str = "") -> None:
        self._counts = counts
        self._device = device
        self._refusal = refusal if counts else "this model has no experts whose choice can be recorded"

    def handle(self, request: ExpertCountsReq) -> ExpertCountsReply:
        """Start from zero, stop, or return the counts and reset them. Raises RequestError."""
        if self._refusal:
            raise RequestError(self._refusal)
        layers: dict[int, list[int]] = {}
        match request.action:
            case "start":
                self.start()
            case "stop":
                self.stop()
            case "dump":
                layers = {layer: counts.take() for layer, counts in self._counts.items()}
        return ExpertCountsReply(layers)

    def start(self) -> None:
        """Count from zero."""
        for counts in self._counts.values():
            counts.start(self._device)

    def stop(self) -> None:
        """Stop counting."""
        for counts in self._counts.values():
            counts.stop()


NO_EXPERTS = ExpertRecorder({}, torch.device("cpu"))
