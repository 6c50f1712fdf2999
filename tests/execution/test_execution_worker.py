"""The thread that runs steps: when results are handed over."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from runner_harness import int32, save_llama

from headrace.config.server_args import ServerArgs
from headrace.errors import ExecutionError, RequestError
from headrace.execution.build import build_worker
from headrace.execution.model_runner import ModelRunner
from headrace.execution.profiler import StepProfiler
from headrace.execution.worker import InlineLane, ModelWorker, ThreadedLane
from headrace.messages.control import ExpertCountsReq
from headrace.messages.operations import StartProfileBody
from headrace.messages.step import ModelWorkerBatch, StepResult
from headrace.messages.weights import WeightExecutor


def plan(step: int) -> ModelWorkerBatch:
    one = int32([0])
    return ModelWorkerBatch(step, (), one, one, int32([1]), int32([1]), one)


def client_of(run: Any, profiler: StepProfiler | None = None) -> Any:
    runner = cast(ModelRunner, SimpleNamespace(run=run, adapters=None))
    return ModelWorker(runner, ThreadedLane, cast(WeightExecutor, None), profiler=profiler)


def test_a_result_is_handed_over_while_the_next_step_computes_and_not_before():
    both_submitted, taken = threading.Event(), threading.Event()
    seen = []

    def run(batch, on_layers):
        assert both_submitted.wait(10)
        if batch.step == 2:
            seen.append(client.lane._done.empty())
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


@pytest.mark.parametrize("fails", [False, True])
def test_whether_a_step_ends_within_a_time_takes_no_result_away(fails: bool):
    may_end = threading.Semaphore(0)

    def run(batch, on_layers):
        assert may_end.acquire(timeout=60)
        if fails and batch.step == 1:
            raise ExecutionError("no")
        return StepResult(batch.step, int32([7]), int32([0, 1]))

    client = client_of(run)
    client.submit(plan(1))
    assert not client.ends_within(0.001)
    may_end.release()
    assert client.ends_within(60)
    assert client.ends_within(60)
    client.submit(plan(2))
    if fails:
        with pytest.raises(ExecutionError):
            client.collect()
    else:
        assert client.collect().step == 1
    may_end.release()
    assert client.collect().step == 2
    client.close()


def test_a_profile_is_asked_for_in_the_thread_of_the_steps_after_those_before_it():
    seen = []

    def run(batch, on_layers):
        seen.append((batch.step, threading.current_thread().name))
        return StepResult(batch.step, int32([7]), int32([0, 1]))

    profiler = StepProfiler(None)
    profiler.start = lambda request, stem: (  # type: ignore[method-assign]
        seen.append(("start", threading.current_thread().name)) or "profiling"
    )
    client = client_of(run, profiler)
    client.submit(plan(1))
    assert client.profile(StartProfileBody()) == "profiling"
    assert seen == [(1, "model-worker"), ("start", "model-worker")]

    with pytest.raises(RequestError, match="no profile is running"):
        client.profile(None)
    with pytest.raises(RequestError, match="no experts"):
        client.count_experts(ExpertCountsReq("start"))
    assert client.collect().step == 1
    client.close()


def test_steps_overlap_unless_that_is_switched_off(tmp_path):
    save_llama(tmp_path)
    options: dict[str, Any] = {"model_path": str(tmp_path), "device": "cpu", "max_total_tokens": 256}
    for off, lane in ((False, ThreadedLane), (True, InlineLane)):
        worker, _ = build_worker(ServerArgs(disable_overlap_schedule=off, **options))
        assert isinstance(worker, ModelWorker)
        assert type(worker.lane) is lane
        worker.close()
