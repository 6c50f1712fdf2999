"""Recording which experts a mixture's routers choose: what is asked of every scheduler, and its answer."""

from typing import Literal, Protocol

import msgspec


class ExpertCountsReq(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Start to record from zero, stop, or tell what there is and begin again at zero."""

    id: int
    action: Literal["start", "stop", "dump"]


class ExpertCountsReply(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """message: why not. layers: by number, the tokens that each expert got (dump)."""

    id: int
    success: bool
    message: str
    layers: dict[int, list[int]] = {}


class ExpertCounter(Protocol):
    """The worker's side."""

    def handle(self, request: ExpertCountsReq) -> ExpertCountsReply:
        """Start, stop or tell, between two steps. Raises RequestError."""
