"""Operations on weights, generation and memory, as awaitable calls of the main process; the scheduler and the worker carry them out.

Owns which operations may run at the same time, waiting for replies, what a restarted replica gets before it serves, and the files in which
tensors are passed (`tensor_file`, in its caller's thread). `update_phases` has the state in force and an update in phases.

    pause, continue     at once, even while others wait; the last one counts. Entered in the log before they are sent.
    cancel              at once: updates and joins of groups that have not taken effect fail
    everything else     one at a time, so that all replicas see the same order
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from headrace.checkpoint.copies import Copies
from headrace.checkpoint.weight_cache import content_of
from headrace.errors import CapacityError, ExecutionError, ModelError, RequestError
from headrace.frontend.communicator import NO_WEIGHTS, RESTART_RETRY_S, Replica, no_live_replica
from headrace.frontend.engine_link import EngineLink
from headrace.frontend.update_phases import (
    NO_REPLY,
    REPLY_TIMEOUT_S,
    OperationLog,
    Refused,
    Replies,
    Standing,
    Undecided,
    UpdatePhases,
    Weights,
    ask,
)
from headrace.log import get_logger
from headrace.messages.weights import (
    CancelUpdate,
    CheckWeights,
    ContinueGeneration,
    DestroyGroup,
    GetWeight,
    InitGroup,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    SaveWeights,
    SchedulerOperation,
    SetWeightVersion,
    Update,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
    WeightOperation,
    WeightOpReply,
    WeightOpReq,
)

logger = get_logger(__name__)

O = TypeVar("O")


@dataclass(eq=False)
class WeightControl:
    """check: raises when the engine is gone. abort_all: ends every request, including those that have not reached a
    scheduler. started_from: fingerprint of the checkpoint that the schedulers started with. on_done: called for every operation that
    succeeded on all replicas. drains: see `UpdatePhases`. copies: of the weights of updates from disk. revive: set by `processes`; starts schedulers
    again that had none to load, waits for them in the caller's thread, and returns why one cannot serve.
    """

    link: EngineLink
    check: Callable[[], None]
    abort_all: Callable[[], None]
    started_from: str = ""
    on_done: Callable[[WeightOperation], None] = lambda operation: None
    drains: bool = True
    copies: Copies = field(default_factory=Copies)
    revive: Callable[[], str] = lambda: ""
    _undecided: set[Undecided] = field(init=False, default_factory=set)
    _groups: dict[str, frozenset[Replica]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.log = OperationLog()
        self._phases = UpdatePhases(self.link, self.log, self.drains)
        self._turn = asyncio.Lock()

    @property
    def version(self) -> str:
        return self.log.standing.version

    @property
    def model_path(self) -> str | None:
        """From where the current weights were read; None if they are those of the start, or were pushed."""
        weights = self.log.standing.weights
        return weights.update.model_path if weights is not None and weights.update is not None else None

    async def operate(self, operation: WeightOperation) -> WeightOpReply:
        """Carry out one operation on every replica; the reply says whether it succeeded on all. After a failure nothing has changed.

        Cancelling this task drops an update that is not decided yet; other operations continue.
        Raises ExecutionError when the engine is gone, CapacityError while it is being restarted, RequestError for invalid operations.
        """
        if not (self.link.awaits_weights and isinstance(operation, UpdateFromDisk)):
            self.check()
        match operation:
            case PauseGeneration() | ContinueGeneration():
                reply = await self._tell(operation)
            case GetWeight() | SaveWeights():
                reply = _sum_of(await self._ask(self._up()[:1], operation))
            case CancelUpdate():
                reply = self._cancel()
            case UpdateFromDisk() if self.link.awaits_weights:
                reply = await _to_its_end(self._revive(operation))
            case UpdateFromDisk() | UpdateFromTensors() | UpdateFromDistributed():
                with self._cancellable() as undecided:
                    async with self._turn:
                        reply = await self._update(operation, undecided)
            case InitGroup():
                reply = await _to_its_end(self._join_group(operation))
            case ReleaseMemory():
                reply = await self._in_turn(self._release, operation)
            case ResumeMemory():
                reply = await self._in_turn(self._resume, operation)
            case DestroyGroup():
                reply = await self._in_turn(self._destroy_group, operation)
            case SetWeightVersion():
                reply = await self._in_turn(self._tell, operation)
            case CheckWeights():
                reply = await self._in_turn(self._check_weights, operation)
        reply = msgspec.structs.replace(reply, weight_version=self.version)
        if reply.success:
            self.on_done(operation)
            if isinstance(operation, UpdateFromDisk) and self.link.has_gone:
                threading.Thread(target=self.revive, name="revive", daemon=True).start()
        return reply

    # -- pause and continue

    async def _tell(self, operation: WeightOperation) -> WeightOpReply:
        """Send an operation that no replica refuses. It is in force from now on: restarted replicas get it from the log."""
        self.log.enter(operation)
        # For an update, the scheduler ends requests, and only once nothing can fail any more.
        match operation:
            case PauseGeneration(mode="abort") | SetWeightVersion(abort_all_requests=True):
                self.abort_all()
        try:
            return _sum_of(await self._ask(self._up(), operation))
        except CapacityError:
            return WeightOpReply(NO_REPLY, True, "it takes effect once the engine has been restarted", self.version)

    # -- one at a time

    async def _in_turn(self, work: Callable[[O], Awaitable[WeightOpReply]], operation: O) -> WeightOpReply:
        async def run() -> WeightOpReply:
            async with self._turn:
                self.check()
                return await work(operation)

        return await _to_its_end(run())

    @contextlib.contextmanager
    def _cancellable(self) -> Iterator[Undecided]:
        undecided = Undecided()
        self._undecided.add(undecided)
        try:
            yield undecided
        finally:
            self._undecided.discard(undecided)

    def _cancel(self) -> WeightOpReply:
        """Cancel what is not decided yet. Replicas are told too, but a silent one is not waited for."""
        number = len(self._undecided)
        for undecided in self._undecided:
            undecided.cancelled.set()
        for replica in self._up():
            replica.sender.send(WeightOpReq(NO_REPLY, CancelUpdate()))
        text = f"cancelled: {number} operations" if number != 1 else "cancelled: 1 operation"
        return WeightOpReply(NO_REPLY, True, text, self.version)

    async def _revive(self, update: UpdateFromDisk) -> WeightOpReply:
        """Start the schedulers that had no weights to load with these."""
        async with self._turn:
            if not self.link.awaits_weights:
                with self._cancellable() as undecided:
                    return await self._update(update, undecided)
            update, before = self._with_copy(update), self.log.standing
            self.log.enter(update)
            why_not = await asyncio.to_thread(self.revive)
            if not self.link.replicas_up():
                self.log.take_back(before)
                return WeightOpReply(NO_REPLY, False, why_not or NO_WEIGHTS, self.version)
            self._drop_copies()
            return WeightOpReply(NO_REPLY, True, "the scheduler was started again with these weights", self.version)

    def _with_copy(self, update: UpdateFromDisk) -> UpdateFromDisk:
        return msgspec.structs.replace(update, keep_at=self.copies.next_path())

    def _drop_copies(self) -> None:
        """All but that of the current weights, unless one may be read now."""
        if self.link.num_restarting:
            return
        weights = self.log.standing.weights
        self.copies.keep_only(weights.copy if weights is not None else "")

    async def _update(self, update: Update, undecided: Undecided) -> WeightOpReply:
        self.check()
        if isinstance(update, UpdateFromDistributed):
            self._check_group(update.group_name)
        if isinstance(update, UpdateFromDisk):
            update = self._with_copy(update)
        try:
            return await self._phases.carry_out(update, undecided, lambda: self._undecided.discard(undecided))
        except Refused as refused:
            if isinstance(update, UpdateFromDistributed) and not refused.is_by_all:
                # Some replicas have left the group, which is unusable without them.
                return await self._leave_group(update.group_name, refused.reply)
            return refused.reply
        finally:
            self._drop_copies()

    async def _release(self, operation: ReleaseMemory) -> WeightOpReply:
        replies = await self._ask_every(operation)
        if all(reply.success for reply in replies.values()):
            self.log.enter(operation)
            return _sum_of(replies)
        # Some were idle and others not: undo it on those that did it.
        taken = tuple(tag for tag in operation.tags if tag not in self.log.standing.released)
        done = [replica for replica, reply in replies.items() if reply.success]
        if done and taken:
            await self._ask_or_dismiss(done, ResumeMemory(taken))
        return _sum_of(replies)

    async def _resume(self, operation: ResumeMemory) -> WeightOpReply:
        replies = await self._ask_every(operation)
        if not any(reply.success for reply in replies.values()):
            return _sum_of(replies)
        self.log.enter(operation)
        # Requests already run on some: restart the others, with their memory.
        self._dismiss_failed(replies)
        return _sum_of({replica: reply for replica, reply in replies.items() if reply.success})

    async def _check_weights(self, operation: CheckWeights) -> WeightOpReply:
        replies = await self._ask_every(operation)
        if len({reply.values for reply in replies.values() if reply.success}) > 1:
            return WeightOpReply(NO_REPLY, False, "the replicas have different weights", self.version)
        return _sum_of(replies)

    # -- process groups

    async def _join_group(self, operation: InitGroup) -> WeightOpReply:
        with self._cancellable() as undecided:
            async with self._turn:
                self.check()
                if undecided.cancelled.is_set():
                    return undecided.refused(self.version).reply
                return await self._init_group(operation)

    async def _init_group(self, operation: InitGroup) -> WeightOpReply:
        """All replicas join, with consecutive ranks. Raises RequestError when the group has no room for all."""
        replicas = self._up()
        last = operation.rank_offset + len(replicas) - 1
        if last >= operation.world_size:
            raise RequestError(
                f"{len(replicas)} replicas take the ranks {operation.rank_offset} to {last}, so world_size must be at least {last + 1}, "
                f"got {operation.world_size}",
                "world_size",
            )
        if self.link.num_restarting:
            raise CapacityError("a replica has died and is being restarted; join once it is back", RESTART_RETRY_S)
        ranks = {replica: operation.rank_offset + i for i, replica in enumerate(replicas)}
        calls = [
            self._ask([replica], msgspec.structs.replace(operation, rank_offset=rank))
            for replica, rank in ranks.items()
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        replies: Replies = {}
        for answer in answers:
            if isinstance(answer, dict):
                replies |= answer
            elif not isinstance(answer, CapacityError):
                raise answer
        self._groups[operation.group_name] = frozenset(replies)
        failed = [reply for reply in replies.values() if not reply.success]
        if len(replies) < len(replicas) and not failed:
            failed = [WeightOpReply(NO_REPLY, False, "a replica died while the group was joined", self.version)]
        if not failed:
            return _sum_of(replies)
        if any(reply.success for reply in replies.values()):
            await self._leave_group(operation.group_name, failed[0])
        return failed[0]

    async def _destroy_group(self, operation: DestroyGroup) -> WeightOpReply:
        joined = self._groups.pop(operation.group_name, frozenset())
        members = [replica for replica in self._up() if replica in joined]
        return _sum_of(await self._ask(members or self._up(), operation))

    async def _leave_group(self, name: str, why: WeightOpReply) -> WeightOpReply:
        joined = self._groups.pop(name, frozenset())
        members = [replica for replica in self.link.replicas_up() if replica in joined]
        if members:
            await self._ask(members, DestroyGroup(name))
        left = f"the group {name!r} was left; join it again"
        message = why.message if left in why.message else f"{why.message}. {left[0].upper()}{left[1:]}"
        return msgspec.structs.replace(why, success=False, message=message)

    def _check_group(self, name: str) -> None:
        """Raises RequestError when a replica was restarted since it joined."""
        members = self._groups.get(name)
        if members is not None and (strangers := [r.index for r in self._up() if r not in members]):
            raise RequestError(
                f"replica {strangers[0]} was restarted since it joined the group {name!r}; destroy the group and join it again",
                "group_name",
            )

    # -- restarted schedulers

    @property
    def can_restore(self) -> bool:
        """False once tensors were pushed: only the replicas that received them have them. From any thread."""
        return self.log.can_be_told

    def reload(self) -> UpdateFromDisk | None:
        """What reads the current weights; None while they are those of the start, or were pushed. From any thread."""
        weights = self.log.standing.weights
        return weights.reload() if weights is not None else None

    async def catch_up(self, replica: Replica, started_from: str) -> None:
        """Bring a restarted replica, which has loaded the checkpoint with this fingerprint, to the state of the others.

        When this returns it is up to date, until something is awaited. Raises ModelError when the files of the current weights are missing
        or have changed, ExecutionError when it dies or cannot follow.
        """
        told = Standing()
        while orders := self.log.standing.orders_after(told):
            aim = self.log.standing
            for order in orders:
                try:
                    await self._repeat(replica, order, aim.weights)
                except ModelError:
                    # Others have come meanwhile, and the copy that was read went.
                    if self.log.standing.weights == aim.weights:
                        raise
                    break
            else:
                told = aim
        self.check_start(started_from)

    def check_start(self, started_from: str) -> None:
        """Raises ModelError when a restarted replica has loaded another checkpoint than the server, and no update has replaced it since."""
        if self.log.standing.weights is None and started_from != self.started_from:
            raise ModelError(
                "the checkpoint's files have changed since the server was started, so this replica would serve other weights under the "
                "same name. Put the old files back, or restart the server to serve the new ones"
            )

    async def _repeat(self, replica: Replica, order: WeightOperation, weights: Weights | None) -> None:
        (reply,) = (await self._ask([replica], order)).values()
        if not reply.success and isinstance(order, UpdateFromDisk):
            raise ModelError(f"the current weights could not be loaded again: {reply.message}")
        if not reply.success:
            raise ExecutionError(f"{type(order).__name__} could not be repeated: {reply.message}")
        if not isinstance(order, UpdateFromDisk) or weights is None:
            return
        current = self.log.standing.weights
        if current == weights and not current.fingerprint:
            self.log.note_fingerprint(reply.fingerprint)
        elif not _is_of(reply.fingerprint, order, current if current == weights else weights):
            raise ModelError(
                "the files of the current weights have changed since they were loaded, so this replica would serve others under the same "
                "name. Put the old files back, or update the weights from the new ones"
            )

    # -- sending operations

    def _up(self) -> list[Replica]:
        replicas = self.link.replicas_up()
        if not replicas:
            raise no_live_replica()
        return replicas

    async def _ask(self, replicas: Sequence[Replica], operation: SchedulerOperation) -> Replies:
        return await ask(self.link, replicas, operation)

    async def _ask_every(self, operation: SchedulerOperation) -> Replies:
        return await self.link.replies.call_every(
            self.link.replicas_up, lambda i: WeightOpReq(i, operation), REPLY_TIMEOUT_S, "weights"
        )

    async def _ask_or_dismiss(self, replicas: Sequence[Replica], operation: SchedulerOperation) -> None:
        """Send an operation that must succeed: a replica where it fails is restarted."""
        try:
            self._dismiss_failed(await self._ask(replicas, operation))
        except CapacityError:
            return  # all have died

    def _dismiss_failed(self, replies: Replies) -> None:
        for replica, reply in replies.items():
            if not reply.success:
                logger.error("restarting replica %d: %s", replica.index, reply.message)
                self.link.dismiss(replica)


async def _to_its_end(work: Coroutine[Any, Any, WeightOpReply]) -> WeightOpReply:
    """Wait for `work`, which continues when the caller gives up waiting."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_note_failure)
        raise


def _is_of(fingerprint: str, order: UpdateFromDisk, weights: Weights) -> bool:
    """Whether the files that were read are those of the weights. Their copy, which nobody else writes, is of another time."""
    if weights.update is not None and order.model_path == weights.update.keep_at:
        return content_of(fingerprint) == content_of(weights.fingerprint)
    return fingerprint == weights.fingerprint


def _note_failure(task: "asyncio.Task[WeightOpReply]") -> None:
    """Log the failure of an operation whose caller has left."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("an operation whose caller has left failed: %s", error)


def _sum_of(replies: Replies) -> WeightOpReply:
    """The first failure, or the first reply, with the paused requests of all."""
    failed = [reply for reply in replies.values() if not reply.success]
    num_paused = sum(reply.num_paused_requests for reply in replies.values())
    return msgspec.structs.replace((failed or list(replies.values()))[0], num_paused_requests=num_paused)


@contextlib.contextmanager
def tensor_file(parts: Iterable[bytes | memoryview]) -> Iterator[str]:
    """The path of named memory with these bytes, which other processes of this user can open, to pass tensors without copying.

    It is not in the file system (memfd_create(2)), so nothing is left behind when a process dies.
    """
    with open(os.memfd_create("headrace-tensors", os.MFD_CLOEXEC), "wb") as file:
        file.writelines(parts)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
