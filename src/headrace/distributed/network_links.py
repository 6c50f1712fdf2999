"""A link between two stages on different hosts: through the connections of their group (network.py), which also notices who is lost."""

import torch

from headrace.distributed.network import NetworkGroup, bytes_of
from headrace.errors import ExecutionError


class NetworkSender:
    """The sending end. rank: the receiver's number."""

    def __init__(self, group: NetworkGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def send(self, hidden: torch.Tensor) -> None:
        """See `Sender.send`. It is not copied here: ZeroMQ's thread sends it from where it lies."""
        self._group.send_hidden(self._rank, hidden)

    def close(self) -> None:
        """See `Sender.close`. The connection is the group's."""


class NetworkReceiver:
    """The receiving end. A rank has one, since only the stage before it sends to it."""

    def __init__(self, group: NetworkGroup) -> None:
        self._group = group

    def receive(self, rows: int) -> torch.Tensor:
        """See `Receiver.receive`. Waits as long as the group is whole."""
        found = self._group.receive_hidden()
        if found.rows != rows:
            raise ExecutionError(f"the stage before sent {found.rows} rows in place of {rows}")
        # Copied because a frame may begin anywhere, and kernels want their tensors aligned.
        hidden = torch.empty(rows, found.columns)
        bytes_of(hidden.numpy())[:] = found.values
        return hidden

    def close(self) -> None:
        """See `Receiver.close`. The connection is the group's."""
