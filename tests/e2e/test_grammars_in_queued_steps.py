"""Grammars in the steps that a GPU queues, on a device of the tests: the scheduler gets the outputs of the CPU's steps."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import running_engine
from test_grammars import CASES, PLAIN, PROMPT, check, ids_of, params_of

from headrace.api.engine import Engine
from headrace.execution import build
from headrace.sampling import grammar_rows

sys.path.insert(0, str(Path(__file__).parent.parent / "execution"))

from device_harness import FakeDevice

PARAMS = [part for case in CASES for part in (params_of(*case), PLAIN)]


@contextmanager
def queueing_engine(model: str, device: FakeDevice, **options: Any) -> Iterator[Engine]:
    """An engine that believes to be on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "CudaDevice", lambda where: device)
        patch.setattr(build.Setup, "is_cpu", False)
        with running_engine(model, attention_backend="torch_native", **options) as engine:
            yield engine


@pytest.fixture(scope="module")
def want(tiny_model: str) -> list[list[int]]:
    with running_engine(tiny_model, attention_backend="torch_native") as engine:
        return ids_of(engine.generate([PROMPT] * len(PARAMS), PARAMS))


@pytest.mark.parametrize(
    "options",
    [{}, {"disable_overlap_schedule": True, "chunked_prefill_size": 3}],
    ids=["overlap", "sync"],
)
def test_outputs_are_those_of_the_cpu(tiny_model, want, options):
    device = FakeDevice()
    with queueing_engine(tiny_model, device, **options) as engine:
        answers = engine.generate([PROMPT] * len(PARAMS), PARAMS)
    for case, answer in zip(CASES, answers[::2], strict=True):
        check(case[0], answer["text"])
    assert ids_of(answers) == want
    assert device.num_waits > 20, "the steps were queued"


def test_retraction_and_late_masks_change_nothing(tiny_model, want, monkeypatch):
    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 0.0)
    with queueing_engine(tiny_model, FakeDevice(), max_total_tokens=256, schedule_conservativeness=0.1) as engine:
        answers = engine.generate([PROMPT] * len(PARAMS), PARAMS)
        assert engine.internal_state().num_retracted > 0
    assert ids_of(answers) == want
