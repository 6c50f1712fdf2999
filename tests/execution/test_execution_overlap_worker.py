"""The thread that runs steps: when results are handed over."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from runner_harness import int32

from headrace.errors import ExecutionError, RequestError
from headrace.execution.model_runner import ModelRunner
from headrace.execution.overlap_worker import TpModelWorkerClient
from headrace.execution.worker import TpModelWorker
from headrace.messages.control import ProfileReq
from headrace.messages.experts import ExpertCountsReq
from headrace.messages.step import ModelWorkerBatch, StepResult
from headrace.messages.weights import WeightExecutor


def plan(step: int) -> ModelWorkerBatch:
    one = int32([0])
    return ModelWorkerBatch(step, (), one, one, int32([1]), int32([1]), one)


def client_of(run: Any) -> TpModelWorkerClient:
    return TpModelWorkerClient(
        TpModelWorker(cast(ModelRunner, SimpleNamespace(run=run, adapters=None)), cast(WeightExecutor, None))
    )


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
        return StepResult(batch.step, int32([7]), int32([0, 1]))

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
        return StepResult(batch.step, int32([7]), int32([0, 1]))

    client = client_of(run)
    client.submit(plan(1))
    client.submit(plan(2))
    both_submitted.set()

    assert client.collect().step == 1
    with pytest.raises(ExecutionError):
        client.collect()
    client.close()


def test_a_profile_is_asked_for_in_the_thread_of_the_steps_after_those_before_it():
    seen = []

    def run(batch, on_layers):
        seen.append((batch.step, threading.current_thread().name))
        return StepResult(batch.step, int32([7]), int32([0, 1]))

    client = client_of(run)
    client._worker.profiler.start = lambda request, stem: (
        seen.append(("start", threading.current_thread().name)) or "profiling"
    )
    client.submit(plan(1))
    assert client.profiler.handle(ProfileReq(True)) == "profiling"
    assert seen == [(1, "model-worker"), ("start", "model-worker")]

    with pytest.raises(RequestError, match="no profile is running"):
        client.profiler.handle(ProfileReq(False))
    with pytest.raises(RequestError, match="no experts"):
        client.experts.handle(ExpertCountsReq("start"))
    assert client.collect().step == 1
    client.close()
