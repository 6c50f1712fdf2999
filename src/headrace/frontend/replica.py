"""One life of a scheduler, as the front end sees it: where to send to it, and whether it is still there."""

from dataclasses import dataclass

from headrace.errors import CapacityError
from headrace.messages.channel import Sender

RESTARTING = "a part of the engine has died and is being started again"
RESTART_RETRY_S = 2.0


@dataclass(slots=True, eq=False)
class Replica:
    """A life. index: 0 to --dp-size - 1. source: signs its outputs, and changes when the detokenizer begins again.

    is_lost: it has died. Another life with the same index is another object.
    """

    index: int
    sender: Sender
    source: int
    is_lost: bool = False


def nobody_lives() -> CapacityError:
    """There is no scheduler to ask now; there will be."""
    return CapacityError(RESTARTING, retry_after_s=RESTART_RETRY_S)
