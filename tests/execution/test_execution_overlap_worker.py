"""The thread that runs steps: when results are handed over."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from runner_harness import int32

from headrace.errors import ExecutionError
from headrace.execution.model_runner import ModelRunner
from headrace.execution.overlap_worker import TpModelWorkerClient
from headrace.execution.worker import TpModelWorker
from headrace.messages.step import ModelWorkerBatch, StepResult
from headrace.messages.weights import WeightExecutor


def plan(step: int) -> ModelWorkerBatch:
    one = int32([0])
    return ModelWorkerBatch(step, (), one, one, int32([1]), np.ones(1, np.bool_), one)


def client_of(run: Any) -> TpModelWorkerClient:
    return TpModelWorkerClient(TpModelWorker(cast(ModelRunner, SimpleNamespace(run=run)), cast(WeightExecutor, None)))


def test_a_result_is_handed_over_while_the_next_step_computes_and_not_before():
    both_submitted, taken = threading.Event(), threading.Event()
    seen = []

    def run(batch, on_layers):
        assert both_submitted.wait(10)
        if batch.step == 2:
            seen.append(client._done.empty())
        on_layers()
        if batch.step == 2:
            assert taken.wait(10)
        return StepResult(batch.step, int32([7]))

    client = client_of(run)
    client.submit(plan(1))
    client.submit(plan(2))
    both_submitted.set()

    first = client.collect().step
    taken.set()

    assert (first, client.collect().step) == (1, 2)
    assert seen == [True]
    client.close()


def test_a_step_that_fails_before_its_layers_holds_no_result_back():
    both_submitted = threading.Event()

    def run(batch, on_layers):
        assert both_submitted.wait(10)
        if batch.step == 2:
            raise ExecutionError("no")
        return StepResult(batch.step, int32([7]))

    client = client_of(run)
    client.submit(plan(1))
    client.submit(plan(2))
    both_submitted.set()

    assert client.collect().step == 1
    with pytest.raises(ExecutionError):
        client.collect()
    client.close()
