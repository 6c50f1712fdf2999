"""Profiles of steps: a file below the operator's folder, and nothing without one."""

import gzip
import json

import pytest
import torch

from headrace.errors import RequestError
from headrace.execution.profiler import StepProfiler
from headrace.messages.operations import StartProfileBody


def run_steps(profiler, numbers):
    for number in numbers:
        with profiler.step(number):
            torch.ones(4, 4) @ torch.ones(4, 4)


def events(folder):
    [path] = folder.glob("*.trace.json.gz")
    return [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


def test_a_profile_names_the_steps_between_start_and_stop(tmp_path):
    profiler = StepProfiler(str(tmp_path))
    run_steps(profiler, [1])
    assert profiler.handle(StartProfileBody("run")) == "profiling"
    with pytest.raises(RequestError, match="is already running"):
        profiler.handle(StartProfileBody())
    run_steps(profiler, [2, 3])
    assert profiler.handle(None).startswith("wrote steps-")

    names = events(tmp_path / "run")
    assert [f"headrace step {i}" in names for i in (1, 2, 3)] == [False, True, True]
    assert "aten::matmul" in names
    with pytest.raises(RequestError, match="no profile"):
        profiler.handle(None)


def test_a_profile_of_so_many_steps_ends_by_itself(tmp_path):
    profiler = StepProfiler(str(tmp_path))
    profiler.handle(StartProfileBody(num_steps=2))
    run_steps(profiler, [1, 2, 3])

    names = events(tmp_path)
    assert [f"headrace step {i}" in names for i in (1, 2, 3)] == [True, True, False]


def test_without_a_folder_there_is_no_profile():
    with pytest.raises(RequestError, match="--profile-dir"):
        StepProfiler(None).handle(StartProfileBody())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RequestError, match="no GPU"):
        StepProfiler(str(tmp_path)).handle(StartProfileBody(activities=("GPU",)))
