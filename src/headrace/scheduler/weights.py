"""Pause, continue, and operations that steps must not meet: changing weights, giving memory back.

Owns the order of these operations and the gate before the planner. Does not touch weights or memory: the worker does, in a thread of
its own, while this loop goes on answering. Runs in the scheduler's thread.

    arrives -> waits in the queue ------> job in the worker's thread -> installed between two steps -> reply
               newcomers wait behind it   nothing is planned            KV of old weights is dropped

An update of several replicas comes in phases, so that all of them have it or none:

    prepare: a job beside the steps -> hold: what has begun ends, nothing begins -> commit: installed, or drop: as if it had not been
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import HeadraceError, RequestError
from headrace.log import get_logger
from headrace.messages.control import AbortReq
from headrace.messages.outputs import TokenIDOut
from headrace.messages.weights import (
    CommitUpdate,
    ContinueGeneration,
    DestroyGroup,
    DropUpdate,
    GetWeight,
    HoldForUpdate,
    InitGroup,
    PauseGeneration,
    Prepared,
    PrepareUpdate,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    Update,
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
from headrace.scheduler.retract import retract_all
from headrace.scheduler.state import SchedulerState

logger = get_logger(__name__)

Replies = Callable[[WeightOpReply], None]
Queued = WorkerOperation | PrepareUpdate | HoldForUpdate | CommitUpdate


@dataclass(frozen=True, slots=True)
class _Staged:
    """An update that is prepared and not yet committed."""

    update_id: int
    update: Update
    done: Prepared


class WeightControl:
    """See the module's text. `handle` takes a message, `advance` is called once a turn."""

    def __init__(self, state: SchedulerState, executor: Callable[[], WeightExecutor], reply: Replies) -> None:
        self._state = state
        self._executor = executor
        self._reply = reply
        self._pausing: list[int] = []
        self._queue: deque[tuple[int, Queued]] = deque()
        self._current: tuple[int, WorkerOperation | PrepareUpdate, WeightJob] | None = None
        self._staged: _Staged | None = None
        self._dropped: set[int] = set()

    @property
    def has_job(self) -> bool:
        """The worker prepares something: `advance` is to be called soon again."""
        return self._current is not None

    def handle(self, request: WeightOpReq) -> list[TokenIDOut]:
        """Take an operation; outputs of the requests that it ends."""
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
                text = f"generation goes on once {released} is resumed" if released else "generation goes on"
                self._answer(request.id, True, text)
            case SetWeightVersion():
                if operation.abort_all_requests:
                    ended = _abort_all(state, "aborted: the weights were given another version")
                state.weight_version = operation.new_version
                self._answer(request.id, True, f"the weight version is {operation.new_version!r}")
            case ReleaseMemory() if not state.gate.holds and (state.running or state.waiting):
                busy = f"{len(state.running)} requests are running and {len(state.waiting)} are waiting"
                self._answer(request.id, False, f"memory cannot be released now: {busy}; pause generation first")
            case DropUpdate():
                self._drop(request.id, operation.update_id)
            case HoldForUpdate():
                state.gate.held = False
                self._queue.append((request.id, operation))
            case (
                PrepareUpdate()
                | CommitUpdate()
                | UpdateFromDisk()
                | UpdateFromTensors()
                | UpdateFromDistributed()
                | InitGroup()
                | DestroyGroup()
                | GetWeight()
                | ReleaseMemory()
                | ResumeMemory()
            ):
                if isinstance(operation, _UPDATES) and operation.abort_all_requests:
                    ended = _abort_all(state, "aborted: the weights are being updated")
                self._queue.append((request.id, operation))
        return ended

    def advance(self) -> None:
        """Do what can be done now."""
        if self._pausing and not self._state.in_flight:
            self._pause()
        if self._current is not None and self._current[2].is_done:
            self._complete(*self._current)
        while self._current is None and self._queue:
            request_id, operation = self._queue[0]
            if isinstance(operation, _BETWEEN_STEPS) and not self._may_begin():
                self._state.gate.draining = True
                return
            self._queue.popleft()
            self._begin(request_id, operation)

    def _pause(self) -> None:
        state = self._state
        if state.gate.pause == "retract":
            retract_all(state, keep_kv=True)
        for request_id in self._pausing:
            self._answer(
                request_id, True, f"generation is paused: {state.gate.pause}" if state.gate.pause else "continued"
            )
        self._pausing.clear()

    def _may_begin(self) -> bool:
        """No step is in flight, and none is to come before the operation: what ran has ended, or is to wait anyway."""
        state = self._state
        if state.in_flight:
            return False
        return state.gate.holds or not (state.running or any(req.has_begun for req in state.waiting))

    def _begin(self, request_id: int, operation: Queued) -> None:
        self._state.gate.draining = False
        match operation:
            case HoldForUpdate():
                self._hold(request_id, operation.update_id)
            case CommitUpdate():
                self._commit(request_id, operation.update_id)
            case PrepareUpdate():
                self._staged = None
                self._start(request_id, operation, operation.update)
            case _:
                self._start(request_id, operation, operation)

    def _start(
        self, request_id: int, operation: WorkerOperation | PrepareUpdate, asked_of_worker: WorkerOperation
    ) -> None:
        gate = self._state.gate
        gate.exclusive = isinstance(operation, _EXCLUSIVE)
        try:
            if "weights" in gate.released and isinstance(asked_of_worker, _UPDATES | GetWeight):
                raise RequestError("the weights are released; resume them first")
            if isinstance(operation, ReleaseMemory) and "kv_cache" in operation.tags:
                retract_all(self._state, keep_kv=False)
                self._state.kv.flush()
            self._current = request_id, operation, self._executor().start(asked_of_worker)
        except HeadraceError as error:
            gate.exclusive = False
            self._answer(request_id, False, error.message)

    def _complete(self, request_id: int, operation: WorkerOperation | PrepareUpdate, job: WeightJob) -> None:
        self._current = None
        self._state.gate.exclusive = False
        try:
            done = job.result()
            if isinstance(operation, PrepareUpdate):
                self._stage(request_id, operation, done)
                return
            done.install()
        except HeadraceError as error:
            logger.error("%s failed: %s", type(operation).__name__, error.message)
            self._answer(request_id, False, error.message)
            return
        except Exception:
            logger.exception("%s failed", type(operation).__name__)
            self._answer(request_id, False, "internal error; the server's log has the cause")
            return
        self._installed(request_id, operation, done)

    def _installed(self, request_id: int, operation: WorkerOperation, done: Prepared) -> None:
        state = self._state
        if done.changes_weights:
            # Everything was computed with the old weights: what is cached, and what paused requests hold.
            retract_all(state, keep_kv=False)
            state.kv.flush()
        match operation:
            case UpdateFromDisk() | UpdateFromTensors() | UpdateFromDistributed():
                state.weight_version = operation.weight_version or state.weight_version
            case ReleaseMemory():
                state.gate.released |= set(operation.tags)
            case ResumeMemory():
                state.gate.released -= set(operation.tags)
        self._answer(request_id, True, done.message, done)

    # -- an update in phases

    def _stage(self, request_id: int, operation: PrepareUpdate, done: Prepared) -> None:
        if operation.update_id in self._dropped:
            self._dropped.discard(operation.update_id)
            self._answer(request_id, False, _DROPPED)
            return
        self._staged = _Staged(operation.update_id, operation.update, done)
        self._answer(request_id, True, done.message, done)

    def _hold(self, request_id: int, update_id: int) -> None:
        if not self._has_staged(request_id, update_id):
            return
        self._state.gate.held = True
        self._answer(request_id, True, "held")

    def _commit(self, request_id: int, update_id: int) -> None:
        if not self._has_staged(request_id, update_id):
            return
        staged, self._staged = self._staged, None
        assert staged is not None
        self._state.gate.held = False
        try:
            staged.done.install()
        except HeadraceError as error:
            logger.error("an update could not be installed: %s", error.message)
            self._answer(request_id, False, error.message)
        except Exception:
            logger.exception("an update could not be installed")
            self._answer(request_id, False, "internal error; the server's log has the cause")
        else:
            self._installed(request_id, staged.update, staged.done)

    def _drop(self, request_id: int, update_id: int) -> None:
        """Whatever phase it is in; those of its messages that wait are answered."""
        gate = self._state.gate
        if self._staged is not None and self._staged.update_id == update_id:
            self._staged = None
        if self._current is not None and _is_phase_of(self._current[1], update_id):
            self._dropped.add(update_id)
        for waiting in [each for each in self._queue if _is_phase_of(each[1], update_id)]:
            self._queue.remove(waiting)
            self._answer(waiting[0], False, _DROPPED)
        gate.held = False
        gate.draining = False  # what waits behind asks for it again
        self._answer(request_id, True, "the update was dropped")

    def _has_staged(self, request_id: int, update_id: int) -> bool:
        if self._staged is not None and self._staged.update_id == update_id:
            return True
        self._answer(request_id, False, f"update {update_id} is not prepared here")
        return False

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
_EXCLUSIVE = _UPDATES | ReleaseMemory | ResumeMemory
_BETWEEN_STEPS = _EXCLUSIVE | HoldForUpdate | CommitUpdate
_DROPPED = "the update was dropped"


def _is_phase_of(operation: Queued, update_id: int) -> bool:
    match operation:
        case PrepareUpdate() | HoldForUpdate() | CommitUpdate():
            return operation.update_id == update_id
        case _:
            return False


def _abort_all(state: SchedulerState, message: str) -> list[TokenIDOut]:
    return control.abort(state, AbortReq(abort_all=True, message=message))
