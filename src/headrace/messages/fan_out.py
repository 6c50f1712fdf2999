"""Sends to several receivers as to one."""

from collections.abc import Sequence

from headrace.messages.channel import Message, Sender


class FanOutSender:
    """Several senders as one."""

    def __init__(self, senders: Sequence[Sender]) -> None:
        self._senders = senders

    def send(self, message: Message) -> None:
        """Send to all."""
        for sender in self._senders:
            sender.send(message)

    def close(self) -> None:
        """See `Sender`."""
        for sender in self._senders:
            sender.close()
