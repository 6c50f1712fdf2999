"""A leader and a follower as threads, each with a device of the tests and the same model: what `build` makes of them on GPUs, with gloo."""

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rank_harness import LIMIT_S, new_group

sys.path.insert(0, str(Path(__file__).parent.parent / "execution"))

from device_harness import FakeDevice, TensorAttention
from runner_harness import CONTEXT, Driver

from headrace.attention import select
from headrace.config.server_args import ServerArgs
from headrace.distributed.base import Shard
from headrace.distributed.one_host import SharedMemoryGroup
from headrace.distributed.rank import Rank
from headrace.errors import ExecutionError
from headrace.execution import build
from headrace.execution.ranks import FollowerRunner

Building = Future[tuple[FollowerRunner, contextlib.ExitStack]]


class OtherRank:
    """The follower as the leader sees it. reasons: for which the ranks were given up. following: ends with its steps."""

    def __init__(self, thread: ThreadPoolExecutor, building: Building, group: SharedMemoryGroup) -> None:
        self.reasons: list[str] = []
        self.following: Future[None]
        self._thread = thread
        self._building = building
        self._group = group

    def check(self) -> None:
        if self._building.done():
            self._building.result()

    def wait_loaded(self) -> None:
        pass

    def wait_ready(self) -> None:
        runner, resources = self._building.result(LIMIT_S)

        def run() -> None:
            with resources:
                runner.follow()

        self.following = self._thread.submit(run)

    def give_up(self, reason: str) -> None:
        self.reasons.append(reason)

    def break_up(self, reason: str) -> None:
        """What the follower does when it fails."""
        self._group.break_up(reason)


@dataclass
class DeviceRanks:
    """driver: of the leader. follower: the other's runner."""

    driver: Driver
    follower: FollowerRunner
    other: OtherRank

    @property
    def devices(self) -> tuple[FakeDevice, FakeDevice]:
        """The leader's and the follower's."""
        leader: Any = self.driver.worker
        follower: Any = self.follower
        return leader.runner._device._device, follower.runner.table.link


@contextlib.contextmanager
def device_ranks(folder: Path, sizes: tuple[int, ...] = (), **options: Any) -> Iterator[DeviceRanks]:
    """sizes: batches that have a graph."""
    defaults = {
        "tp_size": 2,
        "dtype": "float32",
        "max_running_requests": 4,
        "max_total_tokens": 4 * CONTEXT,
        "num_threads": 1,
        "speculative_algorithm": "off",
        "disable_weight_cache": True,
        "attention_backend": "torch_native",
        "page_size": 1,
        "rank_timeout_s": LIMIT_S,
    }
    args = ServerArgs(model_path=str(folder), **{**defaults, **options})
    with (
        pytest.MonkeyPatch.context() as patch,
        new_group(2) as (group, fd),
        ThreadPoolExecutor(1) as thread,
    ):
        patch.setattr(build, "CudaDevice", lambda where: FakeDevice())
        patch.setattr(build.Setup, "is_cpu", False)
        patch.setattr(build, "_graph_sizes", lambda *arguments: sizes)
        patch.setattr(select, "make_backend", lambda *arguments, **named: TensorAttention())
        theirs = SharedMemoryGroup.join(fd, 1, 2, LIMIT_S)
        building = thread.submit(build.build_follower, args, Rank(Shard(1, 2, theirs), group=theirs))
        other = OtherRank(thread, building, theirs)
        try:
            worker, info = build.build_worker(args, rank=Rank(Shard(0, 2, group), group=group), others=other)
            with contextlib.closing(worker):
                yield DeviceRanks(Driver(worker, info), building.result()[0], other)
            if other.reasons:
                with pytest.raises(ExecutionError):
                    other.following.result(LIMIT_S)
            else:
                other.following.result(LIMIT_S)
        finally:
            group.break_up("the test has ended")
