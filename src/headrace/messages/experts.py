"""Recording which experts a mixture's routers choose: the request to every scheduler, and its reply."""

from typing import Literal, Protocol

import msgspec


class ExpertCountsReq(msgspec.Struct, frozen=True, gc=False):
    """Start recording from zero, stop, or return the counts and start again from zero."""

    action: Literal["start", "stop", "dump"]


class ExpertCountsReply(msgspec.Struct, frozen=True, gc=False):
    """layers: layer number -> tokens per expert; empty but for a dump."""

    layers: dict[int, list[int]] = {}


class ExpertCounter(Protocol):
    """The worker's side."""

    def handle(self, request: ExpertCountsReq) -> ExpertCountsReply:
        """Start, stop or return the counts, between two steps. Raises RequestError."""
