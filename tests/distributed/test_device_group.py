"""What ranks exchange from device to device: here gloo between threads, in place of nccl."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from rank_harness import LIMIT_S, new_group

from headrace.distributed.device_group import DeviceGroup
from headrace.distributed.one_host import SharedMemoryGroup
from headrace.errors import ExecutionError
from headrace.kernels import cpu

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)

CPU = torch.device("cpu")
SIZE = 3


@contextlib.contextmanager
def hosts(size: int) -> Iterator[list[SharedMemoryGroup]]:
    """The groups of a host's ranks."""
    with new_group(size) as (group, fd):
        yield [group, *(SharedMemoryGroup.join(fd, rank, size, LIMIT_S) for rank in range(1, size))]


def on_devices(size: int, act: Callable[[DeviceGroup], Any]) -> list[Any]:
    """The results of `act` on every rank, run at the same time."""

    def run(host: SharedMemoryGroup) -> Any:
        group = DeviceGroup.join(host, CPU, LIMIT_S)
        result = act(group)
        group.offer("done", group.rank)
        if group.rank == 0:
            group.offered("done", lambda: None)  # whoever leaves first ends the calls of the others
        group.close()
        return result

    with hosts(size) as groups, ThreadPoolExecutor(size) as threads:
        running = [threads.submit(run, host) for host in groups]
        return [one.result(2 * LIMIT_S) for one in running]


def test_sums_are_the_same_bits_in_every_rank():
    parts = [torch.randn(5, 33, generator=torch.Generator().manual_seed(rank)) for rank in range(SIZE)]

    def act(group: DeviceGroup) -> list[torch.Tensor]:
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            x = parts[group.rank].to(dtype, copy=True)
            group.all_reduce(x)
            found.append(x)
        return found

    ours, *others = on_devices(SIZE, act)
    for theirs in others:
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    torch.testing.assert_close(ours[0], sum(parts))
    torch.testing.assert_close(ours[1].float(), sum(parts), atol=0.1, rtol=0.05)


def test_parts_of_different_width_stand_side_by_side_in_the_leaders_float32():
    columns = [64, 64, 7]
    parts = [torch.randn(4, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in columns]

    def act(group: DeviceGroup) -> torch.Tensor | None:
        out = torch.empty(4, sum(columns)) if group.rank == 0 else None
        group.gather(parts[group.rank], columns, out)
        return out

    found = on_devices(SIZE, act)
    assert torch.equal(found[0], torch.cat(parts, dim=1).float())
    assert found[1:] == [None, None]


def test_followers_get_the_leaders_ids():
    def act(group: DeviceGroup) -> list[int]:
        ids = torch.tensor([5, -1, 131_071]) if group.rank == 0 else torch.zeros(3, dtype=torch.int64)
        group.broadcast(ids)
        return ids.tolist()

    assert on_devices(SIZE, act) == [[5, -1, 131_071]] * SIZE


def test_the_leader_waits_for_numbers_until_a_rank_is_found_lost():
    seen = []

    def check() -> None:
        seen.append(1)
        if len(seen) == 3:
            raise ExecutionError("rank 2 is gone")

    def act(group: DeviceGroup) -> list[int] | str:
        if group.rank == 1:
            group.offer("room", 70)
            group.offer("more", 1)
        if group.rank == 2:
            group.offer("room", 50)
        if group.rank > 0:
            return ""
        assert group.offered("room", lambda: None) == [70, 50]
        with pytest.raises(ExecutionError, match="rank 2 is gone"):
            group.offered("more", check)
        return "raised"

    assert on_devices(SIZE, act)[0] == "raised"


def test_a_rank_that_leaves_breaks_the_group_of_the_host():
    def leave(host: SharedMemoryGroup) -> None:
        DeviceGroup.join(host, CPU, LIMIT_S).close()

    def stay(host: SharedMemoryGroup) -> None:
        group = DeviceGroup.join(host, CPU, LIMIT_S)
        group.check()
        x = torch.ones(3)
        with pytest.raises(ExecutionError, match="the group of ranks is broken: rank 0 cannot reach the others"):
            group.all_reduce(x)
        with pytest.raises(ExecutionError, match="rank 0 cannot reach the others"):
            group.check()
        group.close()
        with pytest.raises(ExecutionError, match="rank 0 has left its group"):
            group.all_reduce(x)

    with hosts(2) as (ours, theirs), ThreadPoolExecutor(2) as threads:
        for one in (threads.submit(stay, ours), threads.submit(leave, theirs)):
            one.result(2 * LIMIT_S)


def test_a_rank_that_does_not_come_ends_the_start():
    def lost() -> None:
        raise ExecutionError("rank 1 died")

    with hosts(2) as (ours, _), pytest.raises(ExecutionError, match="rank 1 died"):
        DeviceGroup.join(ours, CPU, LIMIT_S, lost)
