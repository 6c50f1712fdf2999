"""Operations on weights, generation and memory, as awaitable calls of the main process.

Owns the waiting for their replies, the label of the weights as last heard, and the files that tensors cross in. Does not carry them out:
the scheduler and the worker do. Everything runs in the event loop of the tokenizer manager, except `TensorFile`, which its maker owns.
"""

import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from headrace.errors import HeadraceError
from headrace.frontend.communicator import Communicator
from headrace.messages.channel import Sender
from headrace.messages.weights import (
    PauseGeneration,
    SetWeightVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
    WeightOperation,
    WeightOpReply,
    WeightOpReq,
)

REPLY_TIMEOUT_S = 24 * 3600.0
"""The scheduler answers every operation, and its death ends the wait: this only bounds it."""


class WeightControl:
    """See the module's text.

    check: raises when the engine is gone. abort_all: ends every request, also those that have not reached the scheduler.
    on_done: told of every operation that succeeded.
    """

    def __init__(
        self,
        to_scheduler: Sender,
        check: Callable[[], None],
        abort_all: Callable[[], None],
        on_done: Callable[[WeightOperation], None] = lambda operation: None,
    ) -> None:
        self.version = "default"
        self._to_scheduler = to_scheduler
        self._check = check
        self._abort_all = abort_all
        self._on_done = on_done
        self._replies = Communicator[WeightOpReply]("weights")

    async def operate(self, operation: WeightOperation) -> WeightOpReply:
        """Carry out one operation; its reply says whether it succeeded. Raises ExecutionError when the engine is gone."""
        self._check()
        if _aborts(operation):
            self._abort_all()
        replies = await self._replies.call(
            lambda i: self._to_scheduler.send(WeightOpReq(i, operation)), REPLY_TIMEOUT_S
        )
        if replies[0].success:
            self._on_done(operation)
        return replies[0]

    def handle(self, reply: WeightOpReply) -> None:
        """Take a reply."""
        self.version = reply.weight_version
        self._replies.handle(reply)

    def fail_all(self, error: HeadraceError) -> None:
        """Every waiter gets `error`."""
        self._replies.fail_all(error)


def _aborts(operation: WeightOperation) -> bool:
    match operation:
        case PauseGeneration():
            return operation.mode == "abort"
        case UpdateFromDisk() | UpdateFromTensors() | UpdateFromDistributed() | SetWeightVersion():
            return operation.abort_all_requests
        case _:
            return False


class TensorFile:
    """Memory with a name that this machine's other processes of this user can open: tensors cross in it uncopied.

    It has no place in the file system (memfd_create(2)), so nothing is left behind when a process dies. A context manager.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("headrace-tensors", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Append."""
        for part in parts:
            view = memoryview(part)
            while view.nbytes:
                view = view[os.write(self._fd, view) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
