"""The worker of a model on a GPU: `submit` queues a step, `collect` waits for the oldest.

Owns the steps in flight. With two of them, the device computes one while the scheduler commits the previous one and plans the next.
Runs in the scheduler's thread; the device works beside it.
"""

from collections import deque
from contextlib import ExitStack
from typing import TypeVar

import torch

from headrace.errors import ExecutionError
from headrace.execution.device_runner import DeviceRunner
from headrace.execution.expert_recorder import NO_EXPERTS, ExpertRecorder
from headrace.execution.profiler import StepProfiler
from headrace.execution.queued_step import Pending
from headrace.execution.worker import guarded
from headrace.messages.step import ModelWorkerBatch, StepResult
from headrace.messages.weights import WeightExecutor

_Result = TypeVar("_Result")


class DeviceWorker:
    """The `Worker` protocol over a `DeviceRunner`. resources: closed by `close`."""

    def __init__(
        self,
        runner: DeviceRunner,
        weights: WeightExecutor,
        resources: ExitStack | None = None,
        profiler: StepProfiler | None = None,
        experts: ExpertRecorder = NO_EXPERTS,
    ) -> None:
        self.runner = runner
        self.weights = weights
        self.loras = runner.runner.adapters
        self.profiler = profiler or StepProfiler(None)
        self.experts = experts
        self._resources = resources or ExitStack()
        self._in_flight: deque[tuple[ModelWorkerBatch, Pending | ExecutionError]] = deque()

    def submit(self, batch: ModelWorkerBatch) -> None:
        """Queue the step; errors are raised by `collect`."""
        with self.profiler.step(batch.step):
            self._in_flight.append((batch, _alive(guarded(batch, lambda: self.runner.launch(batch)))))

    def collect(self) -> StepResult:
        """See `Worker.collect`."""
        batch, pending = self._in_flight.popleft()
        result = pending if isinstance(pending, ExecutionError) else _alive(guarded(batch, pending.result))
        if isinstance(result, ExecutionError):
            raise result
        return result

    def rest(self, left: tuple[int, ...]) -> None:
        """See `Worker.rest`."""
        self.runner.runner.rest(left)

    def close(self) -> None:
        """Release all resources. Idempotent."""
        self._in_flight.clear()
        self._resources.close()


def _alive(result: _Result | ExecutionError) -> _Result | ExecutionError:
    """`result`, unless it is an error of the device: that is raised and ends the process, since every later call would fail too."""
    if isinstance(result, ExecutionError) and isinstance(result.__cause__, torch.AcceleratorError):
        raise result.__cause__
    return result
