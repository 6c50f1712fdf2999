"""Operations on weights, generation and memory, as awaitable calls of the main process.

Owns the waiting for their replies, the label of the weights as last heard, what a scheduler that begins a new life has to be told of
earlier operations, and the files that tensors cross in. Does not carry operations out: the scheduler and the worker do. Everything runs
in the event loop of the tokenizer manager, except `TensorFile`, which its maker owns, and where it is said.
"""

import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import msgspec

from headrace.errors import ExecutionError, HeadraceError, RequestError
from headrace.frontend.communicator import Communicator
from headrace.messages.channel import Sender
from headrace.messages.weights import (
    ContinueGeneration,
    InitGroup,
    MemoryTag,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
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

    to_schedulers: reaches all of them. num_schedulers: how many answer. check: raises when the engine is gone. abort_all: ends every
    request, also those that have not reached a scheduler. on_done: told of every operation that succeeded on all.
    """

    def __init__(
        self,
        to_schedulers: Sender,
        num_schedulers: Callable[[], int],
        check: Callable[[], None],
        abort_all: Callable[[], None],
        on_done: Callable[[WeightOperation], None] = lambda operation: None,
    ) -> None:
        self.version = "default"
        self._to_schedulers = to_schedulers
        self._num_schedulers = num_schedulers
        self._check = check
        self._abort_all = abort_all
        self._on_done = on_done
        self._replies = Communicator[WeightOpReply]("weights", num_schedulers)
        self._pushed = False
        self._loaded: UpdateFromDisk | None = None
        self._pause: PauseGeneration | None = None
        self._released: frozenset[MemoryTag] = frozenset()

    async def operate(self, operation: WeightOperation) -> WeightOpReply:
        """Carry out one operation on every replica; the reply says whether it succeeded, on all.

        Raises ExecutionError when the engine is gone, RequestError for what replicas cannot do.
        """
        self._check()
        if isinstance(operation, InitGroup) and self._num_schedulers() > 1:
            raise RequestError("replicas (--dp-size) cannot join a process group; update from disk or from tensors")
        if _aborts(operation):
            self._abort_all()
        replies = await self._ask(self._to_schedulers, operation)
        self.version = replies[0].weight_version
        failed = [reply for reply in replies if not reply.success]
        if not failed:
            self._note(operation)
            self._on_done(operation)
        elif len(failed) < len(replies):
            return msgspec.structs.replace(failed[0], message=f"replicas differ, do it again: {failed[0].message}")
        num_paused = sum(reply.num_paused_requests for reply in replies)
        return msgspec.structs.replace((failed or replies)[0], num_paused_requests=num_paused)

    def handle(self, reply: WeightOpReply) -> None:
        """Take a reply."""
        self._replies.handle(reply)

    # -- a scheduler's new life

    @property
    def can_restore(self) -> bool:
        """False once tensors were pushed: they are nowhere but in the scheduler. From any thread."""
        return not self._pushed

    async def restore(self, to_scheduler: Sender) -> None:
        """Bring a scheduler that has just begun to where the others are, before it gets requests. Raises ExecutionError."""
        for operation in self._history():
            (reply,) = await self._ask(to_scheduler, operation, 1)
            if not reply.success:
                raise ExecutionError(f"{type(operation).__name__} could not be repeated: {reply.message}")

    def _history(self) -> list[WeightOperation]:
        history: list[WeightOperation] = []
        if self._loaded is not None:
            history.append(self._loaded)
        if self.version != "default":
            history.append(SetWeightVersion(self.version))
        if self._pause is not None:
            history.append(self._pause)
        if self._released:
            history.append(ReleaseMemory(tuple(sorted(self._released))))
        return history

    def _note(self, operation: WeightOperation) -> None:
        match operation:
            case UpdateFromDisk():
                self._loaded, self._pushed = operation, False
            case UpdateFromTensors() | UpdateFromDistributed():
                self._pushed = True
            case PauseGeneration():
                self._pause = operation
            case ContinueGeneration():
                self._pause = None
            case ReleaseMemory():
                self._released |= set(operation.tags)
            case ResumeMemory():
                self._released -= set(operation.tags)

    async def _ask(
        self, sender: Sender, operation: WeightOperation, num_asked: int | None = None
    ) -> list[WeightOpReply]:
        return await self._replies.call(lambda i: sender.send(WeightOpReq(i, operation)), REPLY_TIMEOUT_S, num_asked)

    def fail_all(self, error: HeadraceError) -> None:
        """Every waiter gets `error`."""
        self._replies.fail_all(error)


def _aborts(operation: WeightOperation) -> bool:
    match operation:
        case PauseGeneration():
            return operation.mode == "abort"
        case SetWeightVersion():
            return operation.abort_all_requests
        case _:
            # The scheduler ends what an update meets, once nothing can go wrong any more.
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
