"""Recording which experts a mixture's routers choose: the request to every scheduler, and its reply."""

from typing import Literal, Protocol

import msgspec


class ExpertCountsReq(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Start recording from zero, stop, or return the counts and start again from zero."""

    id: int
    action: Literal["start", "stop", "dump"]


class ExpertCountsReply(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """message: why it failed. layers: layer number -> tokens per expert (dump only)."""

    id: int
    success: bool
    message: str
    layers: dict[int, list[int]] = {}


class ExpertCounter(Protocol):
    """The worker's side."""

    def handle(self, request: ExpertCountsReq) -> ExpertCountsReply:
        """Start, stop or return the counts, between two steps. Raises RequestError."""
