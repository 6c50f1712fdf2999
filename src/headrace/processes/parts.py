"""The parts of a running engine besides the main process: one or more schedulers, and the detokenizer."""

from typing import TYPE_CHECKING

from headrace.frontend.data_parallel_controller import FanOutSender
from headrace.messages.channel import Channels
from headrace.messages.control import ShutdownReq

if TYPE_CHECKING:
    pass

STOP_S = 3.0
"""Parts that were asked to leave have so many seconds."""


class Parts:
    """The scheduler and the detokenizer of a running engine, as children or as threads."""

    def __init__(self, channels: Channels, num_schedulers: int = 1) -> None:
        self.channels = channels
        self._to_schedulers = FanOutSender(
            [channels.sender("to_scheduler", replica) for replica in range(num_schedulers)]
        )
        self._to_detokenizer = channels.sender("to_detokenizer")

    def ask_to_leave(self) -> None:
        """The loops end after the message they are at."""
        self._to_schedulers.send(ShutdownReq())
        self._to_detokenizer.send(ShutdownReq())
