"""The model as the scheduler sees it when its layers are in stages: `submit` starts a step here, and `collect` finishes the oldest.

While the other stages compute the steps in flight, the scheduler plans and this stage computes the next one; so it needs no thread of its
own. Runs in the scheduler's thread.
"""

from collections import deque
from contextlib import ExitStack

from headrace.errors import ExecutionError
from headrace.execution.expert_recorder import ExpertRecorder
from headrace.execution.model_runner import Begun
from headrace.execution.profiler import StepProfiler
from headrace.execution.ranks import LeaderRunner
from headrace.execution.worker import TpModelWorker, guarded
from headrace.messages.step import ModelWorkerBatch, StepResult
from headrace.messages.weights import WeightExecutor


class PipelineWorker(TpModelWorker):
    """The `Worker` protocol over the runner of a pipeline's leader. A profile has the part of each step up to what is sent to the next stage."""

    def __init__(
        self,
        runner: LeaderRunner,
        weights: WeightExecutor,
        resources: ExitStack,
        profiler: StepProfiler,
        experts: ExpertRecorder,
    ) -> None:
        super().__init__(runner, weights, resources, profiler, experts)
        self._leader = runner
        self._started: deque[tuple[ModelWorkerBatch, Begun | ExecutionError]] = deque()

    def submit(self, batch: ModelWorkerBatch) -> None:
        """Start the step."""
        with self.profiler.step(batch.step):
            self._started.append((batch, guarded(batch, lambda: self._leader.start_step(batch))))

    def collect(self) -> StepResult:
        """See `Worker.collect`."""
        batch, begun = self._started.popleft()
        if isinstance(begun, ExecutionError):
            raise begun
        result = guarded(batch, lambda: self._leader.finish_step(begun))
        if isinstance(result, ExecutionError):
            raise result
        return result
