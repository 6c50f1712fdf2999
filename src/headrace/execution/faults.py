"""Injected faults of a step, for tests: runners and a sampler that do what the `faults` of a plan say.

Where the server was started with --enable-fault-injection, these are built in place of their bases, and `scheduler/faults.py` puts faults into plans.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from headrace.errors import ExecutionError
from headrace.execution.model_runner import ModelRunner
from headrace.execution.pooling import EmbeddingRunner
from headrace.log import get_logger
from headrace.messages.control import FaultReq
from headrace.messages.step import ModelWorkerBatch, StepResult
from headrace.sampling.sampler import Sampler, SamplerOutput

_logger = get_logger(__name__)


class FaultySampler(Sampler):
    """Does the faults of stage sampling that it was told of, each when its sample is about to get output `at_token`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._faults: list[FaultReq] = []

    def expect(self, faults: Iterable[FaultReq]) -> None:
        """These are due in a step that has begun."""
        self._faults += [fault for fault in faults if fault.stage == "sampling"]

    def takes_largest(self, seqs: Iterable[int]) -> bool:
        """See `Sampler.takes_largest`. Faults change logits."""
        return not self._faults and super().takes_largest(seqs)

    def sample(
        self,
        logits: torch.Tensor,
        seqs: Sequence[int],
        positions: Sequence[int],
        num_outputs: Sequence[int],
        rids: Sequence[str],
    ) -> SamplerOutput:
        failed: dict[int, str] = {}
        for fault in self._faults[:]:
            if fault.rid not in rids or num_outputs[row := rids.index(fault.rid)] != fault.at_token:
                continue
            self._faults.remove(fault)
            if fault.kind == "nan":
                logits[row] = torch.nan
            elif fault.kind == "raise":
                failed[row] = "injected fault while sampling"
            else:
                _do(fault)
        output = super().sample(logits, seqs, positions, num_outputs, rids)
        return replace(output, errors={**output.errors, **failed}) if failed else output


class FaultyRunner(ModelRunner):
    """Does the faults of stage forward, and tells its `FaultySampler` of the others. Steps with faults run in the host."""

    def begin(self, plan: ModelWorkerBatch) -> None:
        super().begin(plan)
        _forward_faults(plan)
        if plan.faults:
            assert isinstance(self.sampler, FaultySampler), self.sampler
            self.sampler.expect(plan.faults)

    def needs_host(self, plan: ModelWorkerBatch) -> bool:
        return bool(plan.faults) or super().needs_host(plan)

    def needs_only_logits(self, plan: ModelWorkerBatch) -> bool:
        return not plan.faults and super().needs_only_logits(plan)


class FaultyEmbeddingRunner(EmbeddingRunner):
    """Does the faults of stage forward."""

    def run(self, plan: ModelWorkerBatch, on_layers: Callable[[], None] = lambda: None) -> StepResult:
        _forward_faults(plan)
        return super().run(plan, on_layers)


def _forward_faults(plan: ModelWorkerBatch) -> None:
    for fault in plan.faults:
        if fault.stage == "forward":
            _do(fault)


def _do(fault: FaultReq) -> None:
    _logger.warning("injected fault: %s at stage %s for %s", fault.kind, fault.stage, fault.rid)
    if fault.kind == "sleep":
        time.sleep(fault.seconds)
    elif fault.kind == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        raise ExecutionError("injected fault in the forward pass")
