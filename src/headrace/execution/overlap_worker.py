"""Runs the model in a thread of its own, so that the scheduler plans while the model computes.

Owns the thread and the order of steps. The next step may be submitted before this one is collected: it reads the tokens that this
one samples from the runner's token buffer. Every step runs in this thread; the scheduler's thread calls `submit` and `collect`.

If the next step has already been submitted, a result is handed over only when that step's layers begin. If the scheduler were woken earlier,
it would compete for the GIL with the preparation of that step, while the cores wait for it.

    worker      prepare n+1 | layers, logits of n+1 .................. | sample | prepare n+2 | layers ...
    scheduler               | commit n, plan n+2 | (waits)                                    | commit n+1, ...
"""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.errors import ExecutionError, HeadraceError
from headrace.execution.worker import TpModelWorker, run_guarded
from headrace.messages.step import ModelWorkerBatch, StepResult

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")
_Todo = ModelWorkerBatch | Callable[[], None] | None
"""A step; a function to call after the steps before it; None = stop."""


class _InThread(Generic[_Request, _Reply]):
    """A part of the worker that is called between two steps: `handle` runs in the thread of the steps, after those submitted before."""

    def __init__(self, todo: "queue.SimpleQueue[_Todo]", handle: Callable[[_Request], _Reply]) -> None:
        self._todo = todo
        self._handle = handle

    def handle(self, request: _Request) -> _Reply:
        """Wait for the reply. Raises its HeadraceError."""
        done: queue.SimpleQueue[_Reply | HeadraceError] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put(self._handle(request))
            except HeadraceError as error:
                done.put(error)

        self._todo.put(run)
        reply = done.get()
        if isinstance(reply, HeadraceError):
            raise reply
        return reply


class TpModelWorkerClient:
    """The `Worker` protocol over a `TpModelWorker`'s runner, one step after another in a thread."""

    def __init__(self, worker: TpModelWorker) -> None:
        self._worker = worker
        self.weights = worker.weights
        self.loras = worker.loras
        self._todo: queue.SimpleQueue[_Todo] = queue.SimpleQueue()
        self.profiler = _InThread(self._todo, worker.profiler.handle)
        self.experts = _InThread(self._todo, worker.experts.handle)
        self._done: queue.SimpleQueue[StepResult | ExecutionError] = queue.SimpleQueue()
        self._num_in_flight = 0
        self._finished: StepResult | ExecutionError | None = None
        self._thread = threading.Thread(target=self._run, name="model-worker", daemon=True)
        self._thread.start()

    def submit(self, batch: ModelWorkerBatch) -> None:
        """Pass the step to the thread; returns at once."""
        self._num_in_flight += 1
        self._todo.put(batch)

    def collect(self) -> StepResult:
        """See `Worker.collect`."""
        assert self._num_in_flight > 0, "collect without a step in flight"
        result = self._done.get()
        self._num_in_flight -= 1
        if isinstance(result, ExecutionError):
            raise result
        return result

    def rest(self, left: tuple[int, ...]) -> None:
        """See `Worker.rest`; returns at once."""
        self._todo.put(lambda: self._worker.rest(left))

    def close(self) -> None:
        """Let the steps in flight finish, end the thread, release the worker. Idempotent."""
        if self._thread.is_alive():
            self._todo.put(None)
            self._thread.join()
        self._worker.close()

    def _run(self) -> None:
        while (batch := self._todo.get()) is not None:
            if not isinstance(batch, ModelWorkerBatch):
                self._hand_over()  # no step follows that would do it
                batch()
                continue
            with self._worker.profiler.step(batch.step):
                result = run_guarded(self._worker.runner, batch, self._hand_over)
            self._hand_over()  # the previous result, in case this step failed before its layers
            self._finished = result
            if self._todo.empty():
                self._hand_over()
        self._hand_over()

    def _hand_over(self) -> None:
        if self._finished is not None:
            result, self._finished = self._finished, None
            self._done.put(result)
