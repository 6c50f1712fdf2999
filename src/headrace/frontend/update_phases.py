"""An update of the weights on all replicas: either all of them have it, or none.

    prepare: every replica loads and checks it beside the steps
    hold:    requests that have begun end with the old weights, others wait
    decided: the update is entered in the log; from here on it is in force, even if replicas die
    commit:  every replica switches

Any failure before the decision (a replica refuses, the caller gives up, the update is cancelled) drops the update everywhere. A replica
that dies before the decision is left out; one that comes back before it is prepared and held like the others; one that dies or comes back
after it gets the update from the log. The decision waits until no request has outputs of the old weights, so that no request mixes two
versions, even if it is sent again after a death. Paused requests are the exception: they continue with the new weights, as documented, and so do
all with --kv-on-update recompute or keep (`drains` is False then).
Runs in the event loop of the tokenizer manager, one update at a time.
"""

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headrace.errors import CapacityError, ExecutionError
from headrace.frontend.communicator import RESTART_RETRY_S, Replica, no_live_replica
from headrace.frontend.engine_link import EngineLink
from headrace.log import get_logger
from headrace.messages.weights import (
    CommitUpdate,
    ContinueGeneration,
    DropUpdate,
    HoldForUpdate,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    PrepareUpdate,
    ReleaseMemory,
    ResumeMemory,
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

Replies = dict[Replica, WeightOpReply]

REPLY_TIMEOUT_S = 24 * 3600.0
"""An upper bound only: the scheduler answers every operation, and its death ends the wait."""
POLL_S = 0.01
"""Seconds between checks whether the requests that have begun have ended."""
CANCELLED = "cancelled; nothing has changed"
NO_REPLY = 0
"""Id of a request whose reply is not waited for."""


FIRST_VERSION = "default"


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that were loaded while serving. number: of the operation. fingerprint: of the files they were read from; "" = not read yet.

    update: None when they were pushed (as tensors, or over a process group), so that no other replica can get them later.
    """

    number: int
    update: UpdateFromDisk | None
    fingerprint: str = field(default="", compare=False)

    @property
    def copy(self) -> str:
        """The folder of their copy; "" if there is none."""
        kept = self.update.keep_at if self.update is not None else ""
        return kept if os.path.exists(kept) else ""

    def reload(self) -> UpdateFromDisk | None:
        """What reads them again; None when they were pushed. Its version follows; it aborts nothing."""
        if self.update is None:
            return None
        if copy := self.copy:
            return UpdateFromDisk(copy)
        return UpdateFromDisk(self.update.model_path, self.update.load_format, keep_at=self.update.keep_at)


@dataclass(frozen=True, slots=True)
class Standing:
    """The state after all operations. weights: None = those of the start."""

    weights: Weights | None = None
    version: str = FIRST_VERSION
    pause: PauseMode | None = None
    released: frozenset[MemoryTag] = frozenset()

    def orders_after(self, told: "Standing") -> list[WeightOperation]:
        """The operations that bring a replica from the state `told` to this one. Raises ExecutionError if that is impossible."""
        orders: list[WeightOperation] = []
        released = told.released
        if self.weights != told.weights:
            if self.weights is None or (reload := self.weights.reload()) is None:
                raise ExecutionError(
                    "the current weights were pushed, so only the replicas that received them have them"
                )
            if released:
                # Released weights cannot be replaced.
                orders.append(ResumeMemory(tuple(sorted(released))))
                released = frozenset()
            orders.append(reload)
        if self.version != told.version:
            orders.append(SetWeightVersion(self.version))
        if self.pause != told.pause:
            orders.append(ContinueGeneration() if self.pause is None else PauseGeneration(self.pause))
        if given := self.released - released:
            orders.append(ReleaseMemory(tuple(sorted(given))))
        if taken := released - self.released:
            orders.append(ResumeMemory(tuple(sorted(taken))))
        return orders


@dataclass(slots=True)
class OperationLog:
    """What operations leave for good: the weights and their version, whether generation is paused, and which memory is released.

    An operation is entered when it is decided, before the replicas carry it out, so that a replica that is restarted meanwhile gets it from
    here. The log keeps only the resulting state (`Standing`), and computes the operations that bring a replica from one such state to another.
    head: id of the last operation; 0 = none yet.
    """

    head: int = 0
    standing: Standing = field(default_factory=Standing)

    @property
    def can_be_told(self) -> bool:
        """False while a restarted replica cannot get the current weights."""
        return self.standing.weights is None or self.standing.weights.update is not None

    def enter(self, operation: WeightOperation, fingerprint: str = "") -> int:
        """Enter an operation, which is in force from now on. Returns its id."""
        self.head += 1
        self.standing = self._after(operation, fingerprint)
        logger.debug("operation %d: %s", self.head, type(operation).__name__)
        return self.head

    def note_fingerprint(self, fingerprint: str) -> None:
        """Of the current weights, which a replica has read for the first time."""
        assert self.standing.weights is not None, fingerprint
        self.standing = replace(self.standing, weights=replace(self.standing.weights, fingerprint=fingerprint))

    def take_back(self, before: Standing) -> None:
        """Restore the weights and version of `before`: no live replica has newer ones."""
        self.head += 1
        self.standing = replace(self.standing, weights=before.weights, version=before.version)

    def _after(self, operation: WeightOperation, fingerprint: str) -> Standing:
        standing = self.standing
        match operation:
            case UpdateFromDisk():
                version = operation.weight_version or standing.version
                return replace(standing, weights=Weights(self.head, operation, fingerprint), version=version)
            case UpdateFromTensors() | UpdateFromDistributed():
                version = operation.weight_version or standing.version
                return replace(standing, weights=Weights(self.head, None), version=version)
            case SetWeightVersion():
                return replace(standing, version=operation.new_version)
            case PauseGeneration():
                return replace(standing, pause=operation.mode)
            case ContinueGeneration():
                return replace(standing, pause=None)
            case ReleaseMemory():
                return replace(standing, released=standing.released | set(operation.tags))
            case ResumeMemory():
                return replace(standing, released=standing.released - set(operation.tags))
            case _:
                return standing


@dataclass(eq=False)
class Refused(Exception):
    """A replica cannot carry out the operation, or the replicas would differ. reply: why. is_by_all: none of them can."""

    reply: WeightOpReply
    is_by_all: bool = True


@dataclass(slots=True, eq=False)
class Undecided:
    """An operation that has not taken effect yet. cancelled: set to cancel it, even while a replica does not answer."""

    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def unless_cancelled(self, call: Coroutine[Any, Any, Replies], version: str) -> Replies:
        """The result of the call. Raises `refused` if the operation is cancelled first."""
        calling, cancelling = asyncio.ensure_future(call), asyncio.ensure_future(self.cancelled.wait())
        try:
            await asyncio.wait({calling, cancelling}, return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            raise self.refused(version)
        finally:
            calling.cancel()
            cancelling.cancel()

    def refused(self, version: str) -> Refused:
        return Refused(WeightOpReply(NO_REPLY, False, CANCELLED, version))


class UpdatePhases:
    def __init__(self, link: EngineLink, log: OperationLog, drains: bool = True) -> None:
        self._link = link
        self._log = log
        self._drains = drains
        self._ids = itertools.count(1)

    async def carry_out(self, update: Update, undecided: Undecided, on_decided: Callable[[], None]) -> WeightOpReply:
        """Give all replicas the update. Cancelling this task before the decision drops it.

        undecided: checked before every phase. on_decided: called when it is in force.

        Raises Refused when a replica's answer caused it to be dropped, CapacityError when a replica's death did.
        """
        update_id = next(self._ids)
        try:
            prepared = await self._prepare_and_hold(update_id, update, undecided)
        except Refused:
            self._drop(update_id)
            if undecided.cancelled.is_set():
                raise undecided.refused(self._log.standing.version) from None
            raise
        except BaseException:
            self._drop(update_id)
            raise
        # Nothing was awaited since the last check of live replicas and running requests.
        before = self._log.standing
        first = next(iter(prepared.values()))
        self._log.enter(update, first.fingerprint)
        on_decided()
        commit = asyncio.ensure_future(self._commit(update_id, list(prepared), first, before))
        try:
            return await asyncio.shield(commit)
        except asyncio.CancelledError:
            await asyncio.wait([commit])
            raise

    async def _prepare_and_hold(self, update_id: int, update: Update, undecided: Undecided) -> Replies:
        """Return when every live replica has prepared the update and is held, and no request that has begun is left."""
        prepared: Replies = {}
        while True:
            if undecided.cancelled.is_set():
                raise undecided.refused(self._log.standing.version)
            up = self._link.replicas_up()
            if not up:
                raise no_live_replica()
            self._check_all_can_follow(update, prepared)
            if missing := [replica for replica in up if replica not in prepared]:
                prepared |= await self._ask_all(missing, PrepareUpdate(update_id, update), undecided)
                continue
            _check_same({replica: prepared[replica] for replica in up})
            await self._ask_all(up, HoldForUpdate(update_id), undecided)
            if self._link.replicas_up() == up and not self._must_wait() and not undecided.cancelled.is_set():
                return {replica: prepared[replica] for replica in up}
            await asyncio.sleep(POLL_S)

    def _must_wait(self) -> bool:
        """Whether a request that has begun must still end with the old weights; paused ones do not count."""
        standing = self._log.standing
        return self._drains and standing.pause is None and not standing.released and self._link.has_begun()

    def _check_all_can_follow(self, update: Update, prepared: Replies) -> None:
        """Raises CapacityError for pushed weights while a replica is being restarted: it could never get them."""
        if isinstance(update, UpdateFromDisk):
            return
        if self._link.num_restarting or any(replica.is_lost for replica in prepared):
            raise CapacityError(
                "a replica has died and is being restarted; send the weights once it is back", RESTART_RETRY_S
            )

    async def _commit(
        self, update_id: int, replicas: list[Replica], prepared: WeightOpReply, before: Standing
    ) -> WeightOpReply:
        version = self._log.standing.version
        try:
            replies = await ask(self._link, replicas, CommitUpdate(update_id))
        except CapacityError:
            # All have died. They will start with these weights.
            return WeightOpReply(NO_REPLY, True, prepared.message, version)
        failed = {replica: reply for replica, reply in replies.items() if not reply.success}
        if len(failed) == len(replies):
            # No live replica has it, so it did not take effect.
            self._log.take_back(before)
            for replica in self._link.replicas_up():
                if replica not in replies:
                    self._link.dismiss(replica)
            return next(iter(failed.values()))
        for replica, reply in failed.items():
            logger.error("replica %d could not switch to the new weights: %s", replica.index, reply.message)
            self._link.dismiss(replica)
        num_paused = sum(reply.num_paused_requests for reply in replies.values())
        return msgspec.structs.replace(prepared, weight_version=version, num_paused_requests=num_paused)

    def _drop(self, update_id: int) -> None:
        """Drop the update without waiting for replies; later messages arrive after it."""
        for replica in self._link.replicas_up():
            replica.sender.send(WeightOpReq(NO_REPLY, DropUpdate(update_id)))

    async def _ask_all(
        self, replicas: Sequence[Replica], operation: SchedulerOperation, undecided: Undecided
    ) -> Replies:
        """Raises Refused unless all live replicas succeed, or when it is cancelled."""
        replies = await undecided.unless_cancelled(ask(self._link, replicas, operation), self._log.standing.version)
        failed = [reply for reply in replies.values() if not reply.success]
        if failed:
            raise Refused(failed[0], len(failed) == len(replies))
        return replies


async def ask(link: EngineLink, replicas: Sequence[Replica], operation: SchedulerOperation) -> Replies:
    return await link.replies.call(replicas, lambda i: WeightOpReq(i, operation), REPLY_TIMEOUT_S, "weights")


def _check_same(prepared: Replies) -> None:
    """Raises Refused when replicas have read different files from the same path."""
    replies = list(prepared.values())
    if len({reply.fingerprint for reply in replies}) > 1:
        message = "the checkpoint changed while the replicas read it, so they would differ; the old weights stay in use"
        raise Refused(msgspec.structs.replace(replies[0], success=False, message=message))
