"""The parts of a running engine besides the main process: one or more schedulers, and the detokenizer."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.messages.channel import Channels
from headrace.messages.control import ReadyInfo, ShutdownReq
from headrace.messages.fan_out import FanOutSender
from headrace.processes.handshake import OnProgress

if TYPE_CHECKING:
    from headrace.frontend.tokenizer_manager import TokenizerManager

STOP_S = 3.0
"""How long parts that were told to leave may take."""


class Parts(ABC):
    """The schedulers and the detokenizer, as child processes (`ChildParts`) or as threads (`ThreadParts`), and the channels to them."""

    def __init__(self, channels: Channels, num_schedulers: int = 1) -> None:
        self.channels = channels
        self._to_schedulers = FanOutSender(
            [channels.sender("to_scheduler", replica) for replica in range(num_schedulers)]
        )
        self._to_detokenizer = channels.sender("to_detokenizer")

    @abstractmethod
    def wait_ready(self, on_progress: OnProgress, should_stop: Callable[[], bool]) -> ReadyInfo:
        """Wait until all can serve. Raises the error of one that cannot, after all have been ended."""

    @abstractmethod
    def watch(self, manager: "TokenizerManager", on_death: Callable[[str], None]) -> None:
        """Call `on_death(message)` from a thread when a part has died for good."""

    def processes(self) -> list[tuple[str, int]]:
        """Name and process id of each part that is a process of its own."""
        return []

    @abstractmethod
    def stop(self) -> None:
        """End the parts: asked first, forced after `STOP_S`. Idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """End the parts now, as far as that is possible. Idempotent."""

    def ask_to_leave(self) -> None:
        """Ask every part to end after the message that it is handling."""
        self._to_schedulers.send(ShutdownReq())
        self._to_detokenizer.send(ShutdownReq())
