"""One incarnation of a scheduler, as the front end sees it: where to send messages, and whether it is alive."""

from dataclasses import dataclass

from headrace.errors import CapacityError
from headrace.messages.channel import Sender

RESTARTING = "a process of the engine has died and is being restarted"
RESTART_RETRY_S = 2.0


@dataclass(slots=True, eq=False)
class Replica:
    """An incarnation. index: 0 to --dp-size - 1. source: marks its outputs, and changes when the detokenizer is restarted.

    is_lost: it has died. The next incarnation with the same index is another object.
    """

    index: int
    sender: Sender
    source: int
    is_lost: bool = False


def no_live_replica() -> CapacityError:
    """The error while every scheduler is being restarted."""
    return CapacityError(RESTARTING, retry_after_s=RESTART_RETRY_S)
