"""A model that several ranks run together: the leader's runner, which plans arrive at and which samples, and the followers'.

Each wraps the `ModelRunner` of its rank. The leader sends each plan to the followers and has it run as if it were alone; the layers exchange what
they need (`distributed`). A follower runs the same steps up to its part of the logits. Both are called by one thread, in which the calls of the
group are in the same order; what other threads of the leader tell the followers goes between two steps (`rank_jobs`).

With stages the leader starts a step, and finishes it when the last stage has sent its hidden states; meanwhile it may start others:

    leader     start n | start n+1 | finish n | start n+2 | finish n+1 | ...
    stage 1              n           n+1        n+2

On devices, steps are queued, except those that need the host: the leader tells the followers how it queues each step, and they queue the same, each
its part. What is sampled stays on the devices: the leader's ids go to the others in the stream of the steps, so no host waits for them, and the order
is the same in every rank:

    leader      tell n | layers n, logits of all | pick | ids n -> | tell late rows | their ids -> | tell n+1 ...
    follower             layers n, its logits           | -> ids n |                | -> their ids | layers n+1 ...

Decode steps in which every row takes the most likely token are one graph in each rank, with the sending of the ids in it. Graphs are captured by all
ranks at the same time, since their captures meet like their steps.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from headrace.distributed.base import Group
from headrace.distributed.device_group import DeviceGroup
from headrace.distributed.rank import Rank
from headrace.errors import ExecutionError, HeadraceError
from headrace.execution.device import Device, upload_parts
from headrace.execution.graphs import GraphPool
from headrace.execution.model_runner import PROMPT_LOGIT_ROWS, Begun, ModelRunner
from headrace.execution.profiler import StepProfiler
from headrace.execution.queued_step import Followers, StepQueue
from headrace.execution.rank_jobs import FollowerJobs, LeaderAdapters, LeaderJobs, Turn, without_pages
from headrace.execution.update_weights import ModelWeights
from headrace.execution.worker import Pending
from headrace.log import get_logger
from headrace.messages.ranks import (
    QueuedKind,
    RankCapture,
    RankFinish,
    RankLateRows,
    RankPages,
    RankStep,
    RankStop,
    SampledTokens,
    StepKind,
    for_followers,
    pack,
    unpack,
)
from headrace.messages.step import Int32Array, ModelWorkerBatch, StepResult
from headrace.messages.weights import Prepared
from headrace.sampling.draw import greedy_ids

_logger = get_logger(__name__)


class OtherRanks(Protocol):
    """The processes of the other ranks, as the leader's sees them."""

    def check(self) -> None:
        """Raises the error of one that has ended instead of loading its part."""
        return

    def wait_loaded(self) -> None:
        """Wait until all have their weights, where they have been told that this is waited for. Raises the error of one that cannot load."""
        return

    def wait_ready(self) -> None:
        """Wait until all can run steps, and watch them from then on. Raises the error of one that cannot."""
        return

    def give_up(self, reason: str) -> None:
        """End every rank: they no longer agree on where they are."""
        return


class _NoOtherRanks(OtherRanks):
    """Those of a whole model."""


NO_OTHER_RANKS: OtherRanks = _NoOtherRanks()


class LeaderRunner(Followers):
    """Runs the steps of all ranks: tells the others of each before `runner` does this rank's part, and is the `Peers` of that runner.

    on_broken: called with the reason when the ranks no longer agree on where they are. settle: see `Peers`.
    """

    def __init__(self, runner: ModelRunner, rank: Rank) -> None:
        super().__init__(runner)
        self.idle = runner.idle
        self.on_broken: Callable[[str], None] = lambda reason: None
        self.settle: Callable[[], None] = lambda: None
        self.only_peaks = False
        self._group = group = group_of(rank)
        self._devices = rank.devices
        self._shares_logits = not rank.shard.is_whole
        self._turn = Turn()
        self.jobs = LeaderJobs(group, self._turn)
        self.adapters = LeaderAdapters(runner.loras, self.jobs)
        self._sampled = SampledTokens()
        self._is_sent = False
        self._absent: set[int] = set()
        runner.peers = weakref.proxy(self)  # no circle: an engine's memory goes with it

    @torch.inference_mode()
    def run(self, plan: ModelWorkerBatch, on_layers: Callable[[], None] = lambda: None) -> StepResult:
        with self.turn():
            self.add(plan)
            self.begin(plan, "whole")
            return self.runner.compute(plan, on_layers)

    @torch.inference_mode()
    def launch(self, plan: ModelWorkerBatch) -> Pending:
        """The first part of `run`: up to what this stage sends to the next."""
        with self.turn():
            self.add(plan)
            self.begin(plan, "whole")
            return _StartedStep(self, self.runner.start(plan))

    def finish(self, begun: Begun) -> StepResult:
        """The second part of `run`, for the oldest of the steps that were launched."""
        with self.turn():
            self._is_sent = True
            if self._shares_logits:
                self.only_peaks = self._needs_only_peaks(begun.plan)
                self._group.send(pack(RankFinish(self.only_peaks)))
            return self.runner.finish(begun)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """If a step fails after the followers have begun it, they are somewhere in it, so the ranks have to start anew."""
        with self._turn:
            self._is_sent = False
            try:
                yield
            except Exception as error:
                if self._is_sent:
                    self._give_up(error)
                raise

    def _give_up(self, error: Exception) -> None:
        """The followers have begun what failed here."""
        _logger.error("a step failed", exc_info=error)
        self.on_broken(error.message if isinstance(error, HeadraceError) else type(error).__name__)

    def add(self, plan: ModelWorkerBatch) -> None:
        """See `ModelRunner.add`. If it fails, the followers do not have the new sequences, and steps with them fail here."""
        self._is_sent = False  # what the followers were told before, they can do to its end
        entering = {new.seq for new in plan.new}
        self._absent |= entering
        self.runner.add(plan)
        self._absent -= entering

    def stop(self) -> None:
        """Let the followers end."""
        with contextlib.suppress(ExecutionError), self._turn:
            self._group.send(pack(RankStop()))

    def begin(self, plan: ModelWorkerBatch, kind: QueuedKind | Literal["whole"]) -> None:
        """Let the followers begin a step that runs in this way; only their tables change if it has failed here already."""
        found: StepKind = "none"
        self.only_peaks = False
        try:
            if self._absent and not self._absent.isdisjoint(plan.seqs.tolist()):
                raise ExecutionError("a sequence of this step could not be entered in the step before")
            self.runner.begin(plan)
            self.only_peaks = kind == "whole" and self.runner.stage.is_whole and self._needs_only_peaks(plan)
            found = kind
        finally:
            sampled, self._sampled = self._sampled, SampledTokens()
            self._is_sent = found != "none"
            self._group.send(pack(RankStep(for_followers(plan), sampled, found, self.only_peaks)))

    @property
    def devices(self) -> DeviceGroup:
        """Those of the ranks, if each has one."""
        assert self._devices is not None, "ranks without devices"
        return self._devices

    def share(self, ids: torch.Tensor) -> None:
        self.devices.broadcast(ids)

    def share_late(self, ids: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> None:
        try:
            self._tell(RankLateRows(seqs, positions))
            self.devices.broadcast(ids)
        except Exception as error:  # kept for the result of that step; but the ranks no longer agree
            self._give_up(error)
            raise

    def capture(self) -> None:
        self._tell(RankCapture())

    def greedy_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Like `draw.greedy_ids`, for a graph: in every rank."""
        ids = greedy_ids(logits)
        self.devices.broadcast(ids)
        return ids

    def _tell(self, message: RankLateRows | RankCapture) -> None:
        """Send what belongs to queued steps, within a turn."""
        self._is_sent = True
        self._group.send(pack(message))

    def note(self, seqs: list[int], positions: list[int], ids: list[int]) -> None:
        """See `Peers`: the followers are told with the next step."""
        before = self._sampled
        self._sampled = SampledTokens(before.seqs + seqs, before.positions + positions, before.ids + ids)

    def _needs_only_peaks(self, plan: ModelWorkerBatch) -> bool:
        """Whether the largest logits of the rows that are sampled say all that is needed."""
        if self.runner.table.host is None:  # a device's sampler takes all
            return False
        return self.runner.sampler.takes_largest(plan.seqs[plan.num_logits > 0].tolist())


@dataclass(frozen=True, slots=True)
class _StartedStep:
    """A step that has left this stage."""

    leader: LeaderRunner
    begun: Begun

    def result(self) -> StepResult:
        return self.leader.finish(self.begun)


class FollowerQueue:
    """What a follower does of the steps that are queued on devices."""

    def __init__(self, runner: ModelRunner, device: Device, graphs: GraphPool | None, devices: DeviceGroup) -> None:
        self._device = device
        self._graphs = graphs
        self._devices = devices
        self._tokens = runner.table.tokens
        self._steps = StepQueue(
            runner, device, graphs, lambda logits, seqs, positions, constrained: received_ids(devices, logits)
        )

    @torch.inference_mode()
    def run(self, plan: ModelWorkerBatch, kind: QueuedKind) -> None:
        """Queue its part of a step whose new sequences have been added."""
        self._steps.run(plan, kind)

    @torch.inference_mode()
    def write_late(self, seqs: Int32Array, positions: Int32Array) -> None:
        """Queue the writing of ids that the leader sends later, int64[n], to the token buffer."""
        at_seqs, at_positions = upload_parts(self._device, [part.astype(np.int64) for part in (seqs, positions)])
        ids = torch.empty_like(at_seqs)
        self._devices.broadcast(ids)
        self._tokens.index_put_((at_seqs, at_positions), ids.clamp(min=0))

    def capture(self) -> None:
        assert self._graphs is not None, "the leader has graphs and this rank has none"
        self._graphs.capture()


def received_ids(devices: DeviceGroup, logits: torch.Tensor) -> torch.Tensor:
    """int64[R]: the leader's choice for the rows of which logits [R, own columns] is this rank's part."""
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    devices.broadcast(ids)
    return ids


class FollowerRunner:
    """Runs this rank's part of the leader's steps, with `runner`. weights: of its part of the model. profiler: of its steps. queued: on a device,
    its part of the steps that are queued there. do_pages: see `FollowerJobs`."""

    def __init__(
        self,
        runner: ModelRunner,
        rank: Rank,
        weights: ModelWeights,
        profiler: StepProfiler,
        do_pages: Callable[[RankPages], Prepared] = without_pages,
    ) -> None:
        self.runner = runner
        self.queued: FollowerQueue | None = None
        self._group = group_of(rank)
        self._profiler = profiler
        self._jobs = FollowerJobs(self._group, runner.loras, weights, profiler, runner.table.tokens.device, do_pages)
        self._started: deque[Begun] = deque()

    @property
    def _on_device(self) -> FollowerQueue:
        assert self.queued is not None, "a step was queued without a device"
        return self.queued

    def follow(self) -> None:
        """Run steps, and what comes between them, until there are no more. Raises ExecutionError when the group is broken, by whichever rank; if
        something else fails, every other rank is told."""
        try:
            self._follow()
        except ExecutionError:
            raise
        except Exception as error:
            _logger.exception("a step failed")
            self._group.break_up(f"rank {self._group.rank}: {type(error).__name__}")
            raise ExecutionError("a step failed; the server's log has the cause") from error

    def _follow(self) -> None:
        while not isinstance(message := unpack(self._group.receive()), RankStop):
            match message:
                case RankStep():
                    with self._profiler.step(message.plan.step):
                        self._run_step(message)
                case RankLateRows():
                    self._on_device.write_late(message.seqs, message.positions)
                case RankCapture():
                    self._on_device.capture()
                case RankFinish():
                    if self.runner.stage.is_first:
                        self._finish(self._started.popleft(), message.only_peaks)
                case _:
                    self._jobs.handle(message)

    @torch.inference_mode()
    def _run_step(self, step: RankStep) -> None:
        runner, plan, sampled = self.runner, step.plan, step.sampled
        if sampled.seqs:
            runner.write_tokens(sampled.seqs, sampled.positions, sampled.ids)
        runner.add(plan)
        if step.kind == "none":
            return
        if step.kind != "whole":
            self._on_device.run(plan, step.kind)
            return
        begun = runner.start(plan)
        if runner.stage.is_whole:
            self._finish(begun, step.only_peaks)
        elif runner.stage.is_first:
            self._started.append(begun)

    @torch.inference_mode()
    def _finish(self, begun: Begun, only_peaks: bool) -> None:
        """This rank's part of the logits that the leader needs, in the leader's order. only_peaks: or of their largest."""
        runner, model = self.runner, self.runner.model
        hidden = runner.final_hidden(begun)
        for row in begun.special:
            _, part = runner.prompt_part(begun, row, hidden)
            for rows in part.split(PROMPT_LOGIT_ROWS) if len(part) else ():
                model.logits(rows)
        if sampled := np.flatnonzero(begun.plan.num_logits).tolist():
            rows = runner.sampled_hidden(begun, hidden, sampled)
            if only_peaks:
                model.peaks(rows)
            else:
                model.logits(rows)


def group_of(rank: Rank) -> Group:
    """Of all ranks; there are others."""
    assert rank.group is not None, rank
    return rank.group
