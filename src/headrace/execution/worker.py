"""The model as the scheduler sees it, synchronous: a step runs inside `submit`.

Owns the results that wait for `collect`, and the boundary at which any exception of a step becomes that step's ExecutionError.
Runs in the scheduler's thread.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Protocol, TypeVar

from headrace.errors import ExecutionError
from headrace.execution.expert_recorder import NO_EXPERTS, ExpertRecorder
from headrace.execution.profiler import StepProfiler
from headrace.log import get_logger
from headrace.messages.lora import Adapters
from headrace.messages.step import ModelWorkerBatch, StepResult
from headrace.messages.weights import WeightExecutor

_logger = get_logger(__name__)

_Result = TypeVar("_Result")


class Runner(Protocol):
    """What runs the steps of a worker, one after another; see `ModelRunner`."""

    @property
    def adapters(self) -> Adapters:
        """What the scheduler loads adapters with."""

    def run(self, plan: ModelWorkerBatch, on_layers: Callable[[], None] = ...) -> StepResult:
        """See `ModelRunner.run`."""

    def rest(self, left: Iterable[int]) -> None:
        """See `ModelRunner.rest`."""


class TpModelWorker:
    """The `Worker` protocol over a runner. resources: closed by `close`."""

    def __init__(
        self,
        runner: Runner,
        weights: WeightExecutor,
        resources: ExitStack | None = None,
        profiler: StepProfiler | None = None,
        experts: ExpertRecorder = NO_EXPERTS,
    ) -> None:
        self.runner = runner
        self.weights = weights
        self.loras = runner.adapters
        self.profiler = profiler or StepProfiler(None)
        self.experts = experts
        self._resources = resources or ExitStack()
        self._done: deque[StepResult | ExecutionError] = deque()

    def submit(self, batch: ModelWorkerBatch) -> None:
        """Run the step; its result, or its failure, waits for `collect`."""
        with self.profiler.step(batch.step):
            self._done.append(run_guarded(self.runner, batch))

    def collect(self) -> StepResult:
        """See `Worker.collect`."""
        result = self._done.popleft()
        if isinstance(result, ExecutionError):
            raise result
        return result

    def rest(self, left: tuple[int, ...]) -> None:
        """See `Worker.rest`."""
        self.runner.rest(left)

    def close(self) -> None:
        """Release what the worker holds. Idempotent."""
        self._resources.close()


def run_guarded(
    runner: Runner, batch: ModelWorkerBatch, on_layers: Callable[[], None] = lambda: None
) -> StepResult | ExecutionError:
    """`Runner.run` within `guarded`."""
    return guarded(batch, lambda: runner.run(batch, on_layers))


def guarded(batch: ModelWorkerBatch, act: Callable[[], _Result]) -> _Result | ExecutionError:
    """The boundary of a step: whatever goes wrong in it is logged once and becomes that step's ExecutionError."""
    try:
        return act()
    except ExecutionError as error:
        _logger.error("step %d failed: %s", batch.step, error.message)
        return error
    except Exception as error:
        _logger.exception("step %d of %d rows failed", batch.step, len(batch.seqs))
        failure = ExecutionError("the model failed while computing this step; the server's log has the cause")
        failure.__cause__ = error
        return failure
