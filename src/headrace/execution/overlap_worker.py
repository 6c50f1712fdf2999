"""One rank's model behind a thread of its own, so that the scheduler plans while the model computes.

Owns the thread and the order of steps. The next step may be submitted before this one is collected: it reads the tokens that this
one samples from the runner's token buffer. Every step runs in the one thread; `submit` and `collect` are the scheduler's.
"""

import queue
import threading

from headrace.errors import ExecutionError
from headrace.execution.worker import TpModelWorker, run_guarded
from headrace.messages.step import ModelWorkerBatch, StepResult


class TpModelWorkerClient:
    """The `Worker` protocol over a `TpModelWorker`'s runner, one step after another in a thread."""

    def __init__(self, worker: TpModelWorker) -> None:
        self._worker = worker
        self.weights = worker.weights
        self._todo: queue.SimpleQueue[ModelWorkerBatch | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[StepResult | ExecutionError] = queue.SimpleQueue()
        self._num_in_flight = 0
        self._thread = threading.Thread(target=self._run, name="model-worker", daemon=True)
        self._thread.start()

    def submit(self, batch: ModelWorkerBatch) -> None:
        """Hand the step to the thread; returns at once."""
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

    def close(self) -> None:
        """Let the steps in flight finish, end the thread, release the worker. Idempotent."""
        if self._thread.is_alive():
            self._todo.put(None)
            self._thread.join()
        self._worker.close()

    def _run(self) -> None:
        while (batch := self._todo.get()) is not None:
            self._done.put(run_guarded(self._worker.runner, batch))
