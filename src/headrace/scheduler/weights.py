"""Pause, continue, and operations that steps must not meet: changing weights, giving memory back.

Owns the order of these operations and the gate before the planner. Does not touch weights or memory: the worker does, in a thread of
its own, while this loop goes on answering. Runs in the scheduler's thread.

    arrives -> waits in the queue ------> job in the worker's thread -> installed between two steps -> reply
               newcomers wait behind it   nothing is planned            KV of old weights is dropped
"""

from collections import deque
from collections.abc import Callable

from headrace.errors import HeadraceError, RequestError
from headrace.log import get_logger
from headrace.messages.control import AbortReq
from headrace.messages.outputs import TokenIDOut
from headrace.messages.weights import (
    ContinueGeneration,
    DestroyGroup,
    GetWeight,
    InitGroup,
    PauseGeneration,
    Prepared,
    ReleaseMemory,
    ResumeMemory,
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
from headrace.scheduler.retract import retract_all
from headrace.scheduler.state import SchedulerState

logger = get_logger(__name__)

Replies = Callable[[WeightOpReply], None]


class WeightControl:
    """See the module's text. `handle` takes a message, `advance` is called once a turn."""

    def __init__(self, state: SchedulerState, executor: Callable[[], WeightExecutor], reply: Replies) -> None:
        self._state = state
        self._executor = executor
        self._reply = reply
        self._pausing: list[int] = []
        self._queue: deque[tuple[int, WorkerOperation]] = deque()
        self._current: tuple[int, WorkerOperation, WeightJob] | None = None

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
            case (
                UpdateFromDisk()
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
            if isinstance(operation, _EXCLUSIVE) and not self._may_begin():
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

    def _begin(self, request_id: int, operation: WorkerOperation) -> None:
        gate = self._state.gate
        gate.draining = False
        gate.exclusive = isinstance(operation, _EXCLUSIVE)
        try:
            if "weights" in gate.released and isinstance(operation, _UPDATES | GetWeight):
                raise RequestError("the weights are released; resume them first")
            if isinstance(operation, ReleaseMemory) and "kv_cache" in operation.tags:
                retract_all(self._state, keep_kv=False)
                self._state.kv.flush()
            self._current = request_id, operation, self._executor().start(operation)
        except HeadraceError as error:
            gate.exclusive = False
            self._answer(request_id, False, error.message)

    def _complete(self, request_id: int, operation: WorkerOperation, job: WeightJob) -> None:
        state = self._state
        self._current = None
        state.gate.exclusive = False
        try:
            done = job.result()
            done.install()
        except HeadraceError as error:
            logger.error("%s failed: %s", type(operation).__name__, error.message)
            self._answer(request_id, False, error.message)
            return
        except Exception:
            logger.exception("%s failed", type(operation).__name__)
            self._answer(request_id, False, "internal error; the server's log has the cause")
            return
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
            )
        )


_UPDATES = UpdateFromDisk | UpdateFromTensors | UpdateFromDistributed
_EXCLUSIVE = _UPDATES | ReleaseMemory | ResumeMemory


def _abort_all(state: SchedulerState, message: str) -> list[TokenIDOut]:
    return control.abort(state, AbortReq(abort_all=True, message=message))
