"""The model as the scheduler sees it: `ModelWorker`, a runner whose steps go through a lane; and its first steps (`warm_up`).

Owns the results that wait for `collect`, and the boundary at which any exception of a step becomes that step's ExecutionError. A lane is chosen when
the worker is built: `InlineLane` runs a step inside `submit`, `ThreadedLane` in a thread of its own, and `QueuedLane` begins it in `submit` and ends
it in `collect`, on a GPU and where the layers are in stages.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from headrace.errors import ExecutionError, HeadraceError
from headrace.execution.profiler import NO_EXPERTS, ExpertRecorder, StepProfiler
from headrace.log import get_logger
from headrace.messages.control import ExpertCountsReply, ExpertCountsReq, ReadyInfo
from headrace.messages.operations import StartProfileBody
from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import ModelWorkerBatch, NewSequence, PageTransfer, StepResult, Worker
from headrace.messages.weights import Adapters, WeightExecutor
from headrace.sampling.params import ResolvedSamplingParams

_logger = get_logger(__name__)

_Result = TypeVar("_Result")
_Reply = TypeVar("_Reply")


class StepHost(Protocol):
    """What every runner has beside its steps; see `ModelRunner`."""

    @property
    def adapters(self) -> Adapters:
        """What the scheduler loads adapters with."""

    def idle(self, left: Iterable[int]) -> None:
        """See `Worker.idle`."""


class Runner(StepHost, Protocol):
    """Runs steps one after another; see `ModelRunner`."""

    def run(self, plan: ModelWorkerBatch, on_layers: Callable[[], None] = ...) -> StepResult:
        """See `ModelRunner.run`."""


class Pending(Protocol):
    """A step that has begun."""

    def result(self) -> StepResult:
        """Wait for the result. To be called once, in the order of the launches."""


class Launcher(StepHost, Protocol):
    """Begins steps, of which several may not have ended."""

    def launch(self, plan: ModelWorkerBatch) -> Pending:
        """Begin a step. Raises what goes wrong before it waits for anything."""


class Lane(ABC):
    """How steps run, in the order of `submit`. Used by the scheduler's thread; here steps run in it, too."""

    @abstractmethod
    def submit(self, batch: ModelWorkerBatch) -> None:
        """See `Worker.submit`."""

    @abstractmethod
    def collect(self) -> StepResult:
        """See `Worker.collect`."""

    def ends_within(self, wait_s: float) -> bool:
        """See `Worker.ends_within`."""
        return True

    def between(self, act: Callable[[], _Reply]) -> _Reply:
        """Call `act` after the steps that were submitted, in their thread, and wait for what it returns. Raises its HeadraceError."""
        return act()

    def later(self, act: Callable[[], None]) -> None:
        """Like `between`, without waiting."""
        act()

    def close(self) -> None:  # noqa: B027, most have nothing to end
        """Let the steps end. Idempotent."""


class InlineLane(Lane):
    """A step runs inside `submit`; its result, or its failure, waits for `collect`."""

    def __init__(self, runner: Runner, profiler: StepProfiler) -> None:
        self._run = runner.run
        self._profiler = profiler
        self._done: deque[StepResult | ExecutionError] = deque()

    def submit(self, batch: ModelWorkerBatch) -> None:
        with self._profiler.step(batch.step):
            self._done.append(_guarded(batch, lambda: self._run(batch)))

    def collect(self) -> StepResult:
        return _raised(self._done.popleft())


class QueuedLane(Lane):
    """`submit` begins a step, `collect` waits for the oldest.

    With two of them a device computes one while the scheduler commits the previous one and plans the next; with stages, the other ones compute them.
    A profile has the part of a step that is in `submit`. in_flight: the steps that have begun.
    """

    def __init__(self, runner: Launcher, profiler: StepProfiler) -> None:
        self._launch = runner.launch
        self._profiler = profiler
        self.in_flight: deque[tuple[ModelWorkerBatch, Pending | ExecutionError]] = deque()

    def submit(self, batch: ModelWorkerBatch) -> None:
        with self._profiler.step(batch.step):
            self.in_flight.append((batch, _alive(_guarded(batch, lambda: self._launch(batch)))))

    def collect(self) -> StepResult:
        batch, pending = self.in_flight.popleft()
        return _raised(pending if isinstance(pending, ExecutionError) else _alive(_guarded(batch, pending.result)))

    def close(self) -> None:
        self.in_flight.clear()


_Todo = ModelWorkerBatch | Callable[[], None] | None
"""A step; a function to call after the steps before it; None = stop."""


class ThreadedLane(Lane):
    """Steps run in a thread of their own, so that the scheduler plans while the model computes.

    The next step may be submitted before this one is collected: it reads the tokens that this one samples from the runner's token buffer. If it has
    been, a result is handed over only when that step's layers begin. If the scheduler were woken earlier, it would compete for the GIL with the
    preparation of that step, while the cores wait for it.

        worker      prepare n+1 | layers, logits of n+1 .................. | sample | prepare n+2 | layers ...
        scheduler               | commit n, plan n+2 | (waits)                                    | commit n+1, ...
    """

    def __init__(self, runner: Runner, profiler: StepProfiler) -> None:
        self._step = runner.run
        self._profiler = profiler
        self._todo: queue.SimpleQueue[_Todo] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[StepResult | ExecutionError] = queue.SimpleQueue()
        self._num_in_flight = 0
        self._finished: StepResult | ExecutionError | None = None
        self._next: StepResult | ExecutionError | None = None
        self._thread = threading.Thread(target=self._run, name="model-worker", daemon=True)
        self._thread.start()

    def submit(self, batch: ModelWorkerBatch) -> None:
        """See `Lane`; returns at once."""
        self._num_in_flight += 1
        self._todo.put(batch)

    def collect(self) -> StepResult:
        assert self._num_in_flight > 0, "collect without a step in flight"
        result, self._next = self._next or self._done.get(), None
        self._num_in_flight -= 1
        return _raised(result)

    def ends_within(self, wait_s: float) -> bool:
        if self._next is None:
            with suppress(queue.Empty):
                self._next = self._done.get(timeout=wait_s)
        return self._next is not None

    def between(self, act: Callable[[], _Reply]) -> _Reply:
        done: queue.SimpleQueue[_Reply | HeadraceError] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put(act())
            except HeadraceError as error:
                done.put(error)

        self._todo.put(run)
        reply = done.get()
        if isinstance(reply, HeadraceError):
            raise reply
        return reply

    def later(self, act: Callable[[], None]) -> None:
        self._todo.put(act)

    def close(self) -> None:
        if self._thread.is_alive():
            self._todo.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (todo := self._todo.get()) is not None:
            if not isinstance(todo, ModelWorkerBatch):
                self._hand_over()  # no step follows that would do it
                todo()
                continue
            with self._profiler.step(todo.step):
                result = _guarded(todo, partial(self._step, todo, self._hand_over))
            self._hand_over()  # the previous result, in case this step failed before its layers
            self._finished = result
            if self._todo.empty():
                self._hand_over()
        self._hand_over()

    def _hand_over(self) -> None:
        if self._finished is not None:
            result, self._finished = self._finished, None
            self._done.put(result)


_Host = TypeVar("_Host", bound=StepHost)


class ModelWorker(Generic[_Host]):
    """The `Worker` protocol over a runner. lane: how its steps run. resources: closed by `close`. pages: or why KV cannot be copied."""

    def __init__(
        self,
        runner: _Host,
        lane: Callable[[_Host, StepProfiler], Lane],
        weights: WeightExecutor,
        resources: ExitStack | None = None,
        profiler: StepProfiler | None = None,
        experts: ExpertRecorder = NO_EXPERTS,
        pages: PageTransfer | str = "this model has no KV cache",
    ) -> None:
        profiler = profiler or StepProfiler(None)
        self.runner = runner
        self.pages: PageTransfer | None = None if isinstance(pages, str) else pages
        self.pages_refusal = pages if isinstance(pages, str) else ""
        self.weights = weights
        self.loras = runner.adapters
        self.lane = lane(runner, profiler)
        self._profiler = profiler
        self._experts = experts
        self._resources = resources or ExitStack()

    def submit(self, batch: ModelWorkerBatch) -> None:
        """See `Worker.submit`; errors are raised by `collect`."""
        self.lane.submit(batch)

    def ends_within(self, wait_s: float) -> bool:
        return self.lane.ends_within(wait_s)

    def collect(self) -> StepResult:
        return self.lane.collect()

    def profile(self, request: StartProfileBody | None) -> str:
        return self.lane.between(lambda: self._profiler.handle(request))

    def count_experts(self, request: ExpertCountsReq) -> ExpertCountsReply:
        return self.lane.between(lambda: self._experts.handle(request))

    def idle(self, left: tuple[int, ...]) -> None:
        self.lane.later(lambda: self.runner.idle(left))

    def close(self) -> None:
        """Let the steps in flight end and release what the worker holds. Idempotent."""
        self.lane.close()
        self._resources.close()


def _guarded(batch: ModelWorkerBatch, act: Callable[[], _Result]) -> _Result | ExecutionError:
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


def _alive(result: _Result | ExecutionError) -> _Result | ExecutionError:
    """`result`, unless it is an error of the device: that is raised and ends the process, since every later call would fail too."""
    if isinstance(result, ExecutionError) and isinstance(result.__cause__, torch.AcceleratorError):
        raise result.__cause__
    return result


def _raised(result: StepResult | ExecutionError) -> StepResult:
    if isinstance(result, ExecutionError):
        raise result
    return result


_WARM_UP_ROOM = 64
"""Tokens of a made-up sequence at most, and slots that it has."""

_WARM_UP_PARAMS = (
    ResolvedSamplingParams(max_new_tokens=_WARM_UP_ROOM, seed=0, temperature=0.0, ignore_eos=True),
    ResolvedSamplingParams(max_new_tokens=_WARM_UP_ROOM, seed=0, temperature=1.0, top_k=8, top_p=0.9, ignore_eos=True),
)

_WARM_UP_STEPS = (
    ((0, 5, True), (1, 20, False)),
    ((0, 1, True), (1, 17, True)),
    ((0, 1, True), (1, 1, True)),
    ((0, 1, True),),
)
"""Rows of each step: sequence, tokens, whether it samples. A prompt, another in two chunks beside decode, decode of two and of one."""


def warm_up(worker: Worker, info: ReadyInfo) -> None:
    """Prompts, chunks beside decode and decode, greedy and drawn. Nothing where two sequences of this length do not fit."""
    if min(info.max_total_tokens // 2, info.context_length) < _WARM_UP_ROOM or info.max_running_requests < 2:
        return
    begin = time.perf_counter()
    computed = [0, 0]
    for number, rows in enumerate(_WARM_UP_STEPS):
        seqs, counts, samples = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        starts = np.array([computed[seq] for seq in seqs], np.int32)
        slots = [
            seq * _WARM_UP_ROOM + start + np.arange(count)
            for seq, start, count in zip(seqs, starts, counts, strict=True)
        ]
        worker.submit(
            ModelWorkerBatch(
                number,
                () if number else (_warm_up_sequence(0, 5), _warm_up_sequence(1, 37)),
                seqs,
                starts,
                counts,
                samples,
                np.concatenate(slots).astype(np.int32),
            )
        )
        worker.collect()
        for seq, count in zip(seqs, counts, strict=True):
            computed[seq] += int(count)
    worker.idle((0, 1))
    get_logger(__name__).debug("warmed up in %.1f s", time.perf_counter() - begin)


def _warm_up_sequence(seq: int, num_tokens: int) -> NewSequence:
    tokens = np.zeros(num_tokens, np.int32)
    return NewSequence(
        seq=seq,
        rid=f"warm-up-{seq}",
        token_ids=tokens,
        num_prompt_tokens=num_tokens,
        prefix_slots=np.empty(0, np.int32),
        task=SampleTask(_WARM_UP_PARAMS[seq]),
        end_token_ids=(),
        content=PromptContent(tokens.tobytes()),
    )
