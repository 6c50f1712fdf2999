"""Pause, continue, and operations on weights and memory.

Owns the order of these operations, their time limit, and the gate before the planner. Does not touch weights or memory: the worker does,
in a thread of its own beside the steps. Runs in the scheduler's thread.

    arrives -> waits in the queue -> prepared in a thread ---------> running requests end -> installed between two steps -> reply
               of operations         while steps continue            nothing new begins      KV of old weights is dropped

An update of several replicas is done in phases, so that either all replicas have it or none:

    prepare: a job beside the steps -> hold: running requests end, none begins -> commit: installed, or drop: nothing changed

With --kv-on-update recompute or keep, requests do not end first: the switch waits for the steps in flight only.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import HeadraceError, RequestError
from headrace.log import get_logger
from headrace.messages.control import AbortReq
from headrace.messages.outputs import TokenIDOut
from headrace.messages.weights import (
    CancelUpdate,
    CheckWeights,
    CommitUpdate,
    ContinueGeneration,
    DropUpdate,
    GetWeight,
    HoldForUpdate,
    InitGroup,
    PauseGeneration,
    Prepared,
    PrepareUpdate,
    ReleaseMemory,
    ResumeMemory,
    SaveWeights,
    SetWeightVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
    WeightExecutor,
    WeightJob,
    WeightOpReply,
    WeightOpReq,
    WorkerOperation,
)
from headrace.scheduler import control
from headrace.scheduler.retract import is_drained, retract_all
from headrace.scheduler.state import SchedulerState

logger = get_logger(__name__)

Replies = Callable[[WeightOpReply], None]
Queued = WorkerOperation | PrepareUpdate | HoldForUpdate | CommitUpdate

JOIN_GRACE_S = 5.0
"""How much longer than its own time limit joining a process group may take before it is given up."""


@dataclass(slots=True)
class _Pending:
    """An operation that the worker is preparing, or has prepared and not yet installed; an update of several replicas is then staged.

    operation: as requested. work: the worker's part of it. deadline_s: limit of the preparation. done: None while it is being prepared.
    has_aborted: the requests that it aborts have been ended. update_id: of an update of several replicas.
    """

    request_id: int
    operation: WorkerOperation | PrepareUpdate
    work: WorkerOperation
    job: WeightJob
    limit_s: float
    deadline_s: float
    done: Prepared | None = None
    has_aborted: bool = False
    update_id: int | None = None


class WeightControl:
    """See the module docstring. `handle` takes a message; `advance` is called once a turn."""

    def __init__(self, state: SchedulerState, executor: Callable[[], WeightExecutor], reply: Replies) -> None:
        self._state = state
        self._executor = executor
        self._reply = reply
        self._pausing: list[int] = []
        self._queue: deque[tuple[int, Queued]] = deque()
        self._current: _Pending | None = None
        self._staged: _Pending | None = None
        state.gate.drains = state.config.kv_on_update == "flush"

    @property
    def has_job(self) -> bool:
        """Whether the worker is busy with an operation, or one waits, so that `advance` must be called again soon."""
        return self._current is not None or bool(self._queue or self._pausing)

    def handle(self, request: WeightOpReq) -> list[TokenIDOut]:
        """Take an operation. Returns the outputs of requests that it ends."""
        state, operation = self._state, request.operation
        ended: list[TokenIDOut] = []
        match operation:
            case PauseGeneration():
                state.gate.pause = operation.mode
                self._pausing.append(request.id)
                if operation.mode == "abort":
                    ended = _abort_all(state, "aborted: generation was paused")
            case ContinueGeneration():
                state.gate.pause = None
                released = ", ".join(sorted(state.gate.released))
                text = f"generation continues once {released} is resumed" if released else "generation continues"
                self._answer(request.id, True, text)
            case SetWeightVersion():
                if operation.abort_all_requests:
                    ended = _abort_all(state, "aborted: the weight version was changed")
                state.kv.weights.name = operation.new_version
                self._answer(request.id, True, f"the weight version is {operation.new_version!r}")
            case CancelUpdate():
                self._answer(request.id, True, self._cancel())
            case DropUpdate():
                phases = PrepareUpdate | HoldForUpdate | CommitUpdate
                self._give_up(_DROPPED, lambda each: isinstance(each, phases) and each.update_id == operation.update_id)
                self._unstage(operation.update_id)
                state.gate.held = False
                self._answer(request.id, True, _DROPPED)
            case ReleaseMemory() if not state.gate.holds and (state.running or state.waiting):
                busy = f"requests running: {len(state.running)}, waiting: {len(state.waiting)}"
                self._answer(request.id, False, f"memory cannot be released now ({busy}); pause generation first")
            case HoldForUpdate():
                state.gate.held = False
                self._queue.append((request.id, operation))
            case _:
                self._queue.append((request.id, operation))
        return ended

    def advance(self, now_s: float) -> list[TokenIDOut]:
        """Do what can be done now. Returns the outputs of requests that this ends."""
        if self._pausing and not self._state.in_flight:
            self._pause()
        ended: list[TokenIDOut] = []
        while True:
            current = self._current
            if current is None:
                went_on = bool(self._queue) and self._take_next(now_s, ended)
            elif current.done is None:
                went_on = self._take_outcome(current, now_s)
            else:
                went_on = self._install(current, current.done, ended)
            if not went_on:
                return ended

    def _pause(self) -> None:
        state = self._state
        if state.gate.pause == "retract":
            retract_all(state, keep_kv=True)
        for request_id in self._pausing:
            self._answer(
                request_id, True, f"generation is paused: {state.gate.pause}" if state.gate.pause else "continued"
            )
        self._pausing.clear()

    # -- the queue

    def _take_next(self, now_s: float, ended: list[TokenIDOut]) -> bool:
        """Start the first operation of the queue. False while it must wait for steps."""
        request_id, operation = self._queue[0]
        match operation:
            case HoldForUpdate() | CommitUpdate():
                staged = self._staged
                if staged is None or staged.update_id != operation.update_id:
                    self._queue.popleft()
                    self._answer(request_id, False, f"update {operation.update_id} is not prepared in this replica")
                    return True
                if not self._is_quiet(staged, ended):
                    return False
                self._queue.popleft()
                if isinstance(operation, HoldForUpdate):
                    self._state.gate.held = True
                    self._answer(request_id, True, "held")
                else:
                    self._commit(request_id, staged)
            case _:
                work = operation.update if isinstance(operation, PrepareUpdate) else operation
                alone = self._executor().holds_steps and isinstance(work, UpdateFromDisk)
                if alone and not _may_switch(self._state):
                    self._state.gate.draining = True
                    return False
                self._queue.popleft()
                self._state.gate.draining, self._state.gate.exclusive = False, alone
                self._start(request_id, operation, work, now_s)
        return True

    def _start(
        self, request_id: int, operation: WorkerOperation | PrepareUpdate, work: WorkerOperation, now_s: float
    ) -> None:
        if isinstance(operation, PrepareUpdate):
            self._unstage()
        limit_s = self._state.config.weight_update_timeout_s or math.inf
        if isinstance(work, InitGroup):
            # Joining ends by its own time limit, unless it hangs.
            limit_s = work.timeout_s + JOIN_GRACE_S
        try:
            if "weights" in self._state.gate.released and isinstance(
                work, _UPDATES | GetWeight | CheckWeights | SaveWeights
            ):
                raise RequestError("the weights are released; resume them first")
            job = self._executor().start(work)
        except HeadraceError as error:
            self._state.gate.exclusive = False
            self._answer(request_id, False, error.message)
            return
        update_id = operation.update_id if isinstance(operation, PrepareUpdate) else None
        self._current = _Pending(request_id, operation, work, job, limit_s, now_s + limit_s, update_id=update_id)

    def _take_outcome(self, current: _Pending, now_s: float) -> bool:
        """Handle the result of the job, or its timeout. False while it is still running."""
        if not current.job.is_done:
            if now_s < current.deadline_s:
                return False
            self._fail(current, _too_long(current.work, current.limit_s))
            return True
        try:
            done = current.job.result()
        except HeadraceError as error:
            logger.error("%s failed: %s", type(current.work).__name__, error.message)
            self._fail(current, error.message)
        except Exception:
            logger.exception("%s failed", type(current.work).__name__)
            self._fail(current, _INTERNAL_ERROR)
        else:
            current.done = done
            if current.update_id is not None:
                self._leave(current)
                self._staged = current
                self._answer(current.request_id, True, done.message, done)
        return True

    # -- the switch

    def _install(self, current: _Pending, done: Prepared, ended: list[TokenIDOut]) -> bool:
        """Install a prepared operation. False while it waits for steps. Outputs of requests that it ends are added to `ended`."""
        work = current.work
        if isinstance(work, _BETWEEN_STEPS) and not self._is_quiet(current, ended):
            return False
        if failure := self._installed(work, done):
            self._fail(current, failure)
        else:
            self._leave(current)
            self._answer(current.request_id, True, done.message, done)
        return True

    def _commit(self, request_id: int, staged: _Pending) -> None:
        self._staged = None
        self._state.gate.held = False
        done = staged.done
        assert done is not None, staged.update_id
        if failure := self._installed(staged.work, done):
            self._answer(request_id, False, failure)
        else:
            self._answer(request_id, True, done.message, done)

    def _is_quiet(self, pending: _Pending, ended: list[TokenIDOut]) -> bool:
        """Whether no step is in flight and none will come before the switch. If not, no new request begins from now on."""
        gate, work = self._state.gate, pending.work
        if isinstance(work, _UPDATES) and work.abort_all_requests and not pending.has_aborted:
            # Not earlier: an update that fails must not end any request.
            pending.has_aborted = True
            ended += _abort_all(self._state, "aborted: the weights are being updated")
        gate.draining = not _may_switch(self._state)
        return not gate.draining

    def _installed(self, work: WorkerOperation, done: Prepared) -> str:
        """Switch to the prepared state. Returns why that failed, or "". No step is in flight."""
        state = self._state
        if isinstance(work, ReleaseMemory) and "kv_cache" in work.tags:
            retract_all(state, keep_kv=False)
            state.kv.flush()
        try:
            done.install()
        except HeadraceError as error:
            logger.error("%s failed: %s", type(work).__name__, error.message)
            return error.message
        except Exception:
            logger.exception("%s failed", type(work).__name__)
            return _INTERNAL_ERROR
        if done.changes_weights:
            if state.config.kv_on_update != "keep":
                # Cached KV, and the KV of requests that go on, was computed with the old weights.
                retract_all(state, keep_kv=False)
                state.kv.flush("weights")
            state.encodings.clear()
        match work:
            case UpdateFromDisk() | UpdateFromTensors() | UpdateFromDistributed():
                state.kv.weights_changed(work.weight_version or state.weight_version)
            case ReleaseMemory():
                state.gate.released |= set(work.tags)
            case ResumeMemory():
                state.gate.released -= set(work.tags)
        if state.tier is not None and (done.changes_weights or isinstance(work, ResumeMemory)):
            state.tier.tier.weights_changed()
        if state.rooms is not None and (done.changes_weights or isinstance(work, ResumeMemory)):
            state.rooms.weights_changed()
        return ""

    # -- ends before the switch

    def _cancel(self) -> str:
        # Once held, it is committed or dropped from outside, the same for all replicas.
        staged = self._staged if not self._state.gate.held else None
        number = self._give_up(_CANCELLED, lambda each: _is_cancellable(each, staged))
        if staged is not None:
            self._unstage()
        return f"cancelled: {number} operations" if number != 1 else "cancelled: 1 operation"

    def _give_up(self, why: str, chosen: Callable[[Queued], bool]) -> int:
        """Fail the chosen operations that wait or are being prepared. Returns their number."""
        dropped = [waiting for waiting in self._queue if chosen(waiting[1])]
        for waiting in dropped:
            self._queue.remove(waiting)
            self._answer(waiting[0], False, why)
        current = self._current
        if current is None:
            # The head of the queue sets it again.
            self._state.gate.draining = False
        elif chosen(current.operation):
            self._fail(current, why)
            return len(dropped) + 1
        return len(dropped)

    def _unstage(self, update_id: int | None = None) -> None:
        """Drop the prepared update (only the one with this id, if given)."""
        staged = self._staged
        if staged is not None and update_id in (None, staged.update_id):
            self._staged = staged.done = None
            staged.job.abandon()

    def _fail(self, current: _Pending, message: str) -> None:
        """End the operation with an error; nothing has changed."""
        self._leave(current)
        current.done = None
        current.job.abandon()
        self._answer(current.request_id, False, message)

    def _leave(self, current: _Pending) -> None:
        assert self._current is current, "another operation is under way"
        self._current = None
        self._state.gate.draining = self._state.gate.exclusive = False

    def _answer(self, request_id: int, success: bool, message: str, done: Prepared | None = None) -> None:
        state = self._state
        self._reply(
            WeightOpReply(
                request_id,
                success,
                message,
                state.weight_version,
                num_paused_requests=len(state.running) + len(state.waiting) if state.gate.holds else 0,
                shape=done.shape if done else (),
                values=done.values if done else b"",
                fingerprint=done.fingerprint if done else "",
            )
        )


_UPDATES = UpdateFromDisk | UpdateFromTensors | UpdateFromDistributed
_BETWEEN_STEPS = _UPDATES | ReleaseMemory | ResumeMemory
"""Operations whose installation needs that no step is in flight."""
_DROPPED = "the update was dropped"
_CANCELLED = "cancelled; nothing has changed"
_INTERNAL_ERROR = "internal error; see the server's log"


def _is_cancellable(operation: Queued, staged: _Pending | None) -> bool:
    match operation:
        case HoldForUpdate():
            return staged is None or staged.update_id == operation.update_id
        case CommitUpdate():
            return False
        case _:
            return isinstance(operation, _UPDATES | InitGroup | PrepareUpdate)


def _too_long(operation: WorkerOperation, limit_s: float) -> str:
    if isinstance(operation, InitGroup):
        return f"the group could not be joined within {operation.timeout_s:g} s: a peer is silent"
    return (
        f"gave up after {limit_s:g} s (--weight-update-timeout-s); nothing has changed. The hanging read "
        "cannot be interrupted; its result will be discarded"
    )


def _may_switch(state: SchedulerState) -> bool:
    """Whether no step is in flight, and, if updates wait for that, no request that has begun will take another."""
    return not state.in_flight and (not state.gate.drains or is_drained(state))


def _abort_all(state: SchedulerState, message: str) -> list[TokenIDOut]:
    return control.abort(state, AbortReq(abort_all=True, message=message))
