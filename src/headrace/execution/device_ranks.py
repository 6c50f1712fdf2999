"""The queued steps of a model that several ranks run, each on a device of its own.

The leader tells the followers how it queues each step, and they queue the same, each its part. What is sampled stays on the devices: the leader's
ids go to the others in the stream of the steps, so no host waits for them, and the order is the same in every rank:

    leader      tell n | layers n, logits of all | pick | ids n -> | tell late rows | their ids -> | tell n+1 ...
    follower             layers n, its logits           | -> ids n |                | -> their ids | layers n+1 ...

Decode steps in which every row takes the most likely token are one graph in each rank, with the sending of the ids in it. Graphs are captured by all
ranks at the same time, since their captures meet like their steps. A rank that has stopped shows as values that never come, where the leader waits
for its device (`WatchedDevice`).
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.distributed.device_group import DeviceGroup
from headrace.errors import ExecutionError
from headrace.execution.device import Device, Download, Event, Graph, upload_parts
from headrace.execution.graphs import GraphPool
from headrace.execution.model_runner import ModelRunner
from headrace.execution.ranks import LeaderRunner
from headrace.execution.step_queue import StepQueue
from headrace.messages.ranks import QueuedKind, RankCapture, late_rows
from headrace.messages.step import Int32Array, ModelWorkerBatch
from headrace.messages.weights import Adapters
from headrace.sampling.draw import greedy_ids


class Followers(Protocol):
    """The other ranks, as the leader's queued steps see them. All but `turn` is called within a turn. adapters: of all ranks."""

    @property
    def adapters(self) -> Adapters: ...

    def turn(self) -> AbstractContextManager[None]:
        """What a step, and what comes between two steps, runs in: see `Turn`."""

    def add(self, plan: ModelWorkerBatch) -> None:
        """See `ModelRunner.add`."""

    def begin(self, plan: ModelWorkerBatch, kind: QueuedKind | Literal["whole"]) -> None:
        """See `ModelRunner.begin`; they queue the step, too, or run it whole."""

    def share(self, ids: torch.Tensor) -> None:
        """Queue the sending of the step's ids int64[R], those of constrained rows aside."""

    def share_late(self, ids: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> None:
        """Queue the sending of further ids int64[n] of the last step; where they go."""

    def capture(self) -> None:
        """They capture their graphs, as the leader is about to."""


class NoFollowers:
    """`Followers` of a model on one device. runner: of it."""

    def __init__(self, runner: ModelRunner) -> None:
        self.adapters = runner.adapters
        self._runner = runner

    def turn(self) -> AbstractContextManager[None]:
        """See `Followers`."""
        return nullcontext()

    def add(self, plan: ModelWorkerBatch) -> None:
        """See `Followers`."""
        self._runner.add(plan)

    def begin(self, plan: ModelWorkerBatch, kind: QueuedKind | Literal["whole"]) -> None:
        """See `Followers`."""
        self._runner.begin(plan)

    def share(self, ids: torch.Tensor) -> None:
        """See `Followers`."""

    def share_late(self, ids: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> None:
        """See `Followers`."""

    def capture(self) -> None:
        """See `Followers`."""


class LeaderFollowers:
    """The `Followers` of a `LeaderRunner`."""

    def __init__(self, leader: LeaderRunner, devices: DeviceGroup) -> None:
        self.adapters = leader.adapters
        self._leader = leader
        self._devices = devices

    def turn(self) -> AbstractContextManager[None]:
        """See `Followers`."""
        return self._leader.in_turn()

    def add(self, plan: ModelWorkerBatch) -> None:
        """See `Followers`."""
        self._leader.add(plan)

    def begin(self, plan: ModelWorkerBatch, kind: QueuedKind | Literal["whole"]) -> None:
        """See `Followers`."""
        self._leader.begin(plan, kind)

    def share(self, ids: torch.Tensor) -> None:
        """See `Followers`."""
        self._devices.broadcast(ids)

    def share_late(self, ids: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> None:
        """See `Followers`."""
        try:
            self._leader.tell(late_rows(seqs, positions))
            self._devices.broadcast(ids)
        except Exception as error:  # kept for the result of that step; but the ranks no longer agree
            self._leader.give_up(error)
            raise

    def capture(self) -> None:
        """See `Followers`."""
        self._leader.tell(RankCapture())

    def greedy_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Like `draw.greedy_ids`, for a graph: in every rank."""
        ids = greedy_ids(logits)
        self._devices.broadcast(ids)
        return ids


class FollowerQueue:
    """The `QueuedPart` of a follower on a device."""

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
        """See `QueuedPart`."""
        self._steps.run(plan, kind)

    @torch.inference_mode()
    def write_late(self, seqs: Int32Array, positions: Int32Array) -> None:
        """See `QueuedPart`."""
        at_seqs, at_positions = upload_parts(self._device, [part.astype(np.int64) for part in (seqs, positions)])
        ids = torch.empty_like(at_seqs)
        self._devices.broadcast(ids)
        self._tokens.index_put_((at_seqs, at_positions), ids.clamp(min=0))

    def capture(self) -> None:
        """See `QueuedPart`."""
        assert self._graphs is not None, "the leader has graphs and this rank has none"
        self._graphs.capture()


def received_ids(devices: DeviceGroup, logits: torch.Tensor) -> torch.Tensor:
    """int64[R]: the leader's choice for the rows of which logits [R, own columns] is this rank's part."""
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    devices.broadcast(ids)
    return ids


_SHORTEST_NAP_S = 20e-6
_LONGEST_NAP_S = 200e-6
"""Between two looks at the device; each nap is twice the one before. With two steps in flight the device has work meanwhile."""


class WatchedDevice:
    """A `Device` whose waits end when the group is broken, or after `limit_s`: then it breaks up the group and calls `on_broken` with the reason."""

    def __init__(self, device: Device, devices: DeviceGroup, limit_s: float, on_broken: Callable[[str], None]) -> None:
        self._device = device
        self._devices = devices
        self._limit_s = limit_s
        self._on_broken = on_broken

    def upload(self, values: npt.NDArray[np.generic], out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Device`."""
        return self._device.upload(values, out)

    def download(self, values: torch.Tensor) -> Download:
        """See `Device`. Its `wait` raises ExecutionError when the other ranks do not do their part."""
        return _WatchedDownload(self._device.download(values), self)

    def record(self) -> Event:
        """See `Device`."""
        return self._device.record()

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Device`."""
        return self._device.capture(run)

    def settle(self) -> None:
        """Wait for what is queued, so that reading values does not wait for other ranks any more. Raises ExecutionError like `download`."""
        self.wait_for(self._device.record().is_done)

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`. Raises ExecutionError."""
        end_s, nap_s = time.monotonic() + self._limit_s, _SHORTEST_NAP_S
        try:
            while not is_done():
                self._devices.check()
                if time.monotonic() > end_s:
                    reason = f"the ranks' devices did not finish a step within {self._limit_s:g} s (--rank-timeout-s)"
                    self._devices.break_up(reason)
                    raise ExecutionError(f"the group of ranks is broken: {reason}")
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        except ExecutionError as error:
            self._on_broken(error.message)
            raise


class _WatchedDownload:
    def __init__(self, download: Download, device: WatchedDevice) -> None:
        self._download = download
        self._device = device

    def is_done(self) -> bool:
        return self._download.is_done()

    def wait(self) -> npt.NDArray[np.int64]:
        self._device.wait_for(self._download.is_done)
        return self._download.wait()
