"""Collectives of ranks in processes of their own: every rank gets the same bits, and no wait outlives its group."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rank_harness import (
    LIMIT_S,
    RankProcess,
    gathers,
    messages,
    mixed,
    new_group,
    one_gather,
    one_message,
    one_sum,
    peaks,
    sums,
)

from headrace.distributed.one_host import SharedMemoryGroup
from headrace.errors import ConfigError, ExecutionError
from headrace.kernels import cpu

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)


@pytest.fixture
def caller():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def switches(process: RankProcess) -> int:
    """How often the main thread of a process went to sleep."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("voluntary_ctxt_switches")]
    return int(found.split()[1])


@pytest.mark.parametrize("task", [sums, gathers, messages, mixed, peaks], ids=lambda task: task.__name__)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_ranks_tell_each_other_is_the_same_in_each(size, task, others):
    with new_group(size) as (group, fd):
        for rank in range(1, size):
            others[rank - 1].begin(task, fd, rank, size)
        task(group)
        for process in others[: size - 1]:
            process.has_joined()
            assert process.result() == ""


@pytest.mark.parametrize("task", [one_sum, one_gather, one_message], ids=lambda task: task.__name__)
def test_a_rank_that_is_killed_ends_the_waits_of_the_others_when_one_says_so(task, others, victim, caller):
    """In the gather and the message the leader waits for nobody but the killed rank: it makes enough of them to wait."""
    (waiting, *_), size = others, 3
    with new_group(size) as (group, fd):
        victim.begin(one_message, fd, 2, size)
        victim.has_joined()  # and waits for a message
        waiting.begin(one_sum, fd, 1, size)
        waiting.has_joined()
        own = caller.submit(lambda: [task(group) for _ in range(20)])
        victim.kill()
        group.break_up("rank 2 died")
        with pytest.raises(ExecutionError, match="rank 2 died"):
            own.result(LIMIT_S)
        assert waiting.result() == "ExecutionError: the group of ranks is broken: rank 2 died"
        with pytest.raises(ExecutionError, match="rank 2 died"):
            group.send(b"")


def test_a_rank_that_does_not_come_breaks_the_group_after_the_limit():
    with new_group(3, limit_s=0.1) as (group, fd):
        second = SharedMemoryGroup.join(fd, 2, 3, LIMIT_S)
        reason = "rank 1 did not answer within 0.1 s"
        with pytest.raises(ExecutionError, match=reason):
            group.all_reduce(torch.zeros(3))
        with pytest.raises(ExecutionError, match=reason):
            second.receive()


def test_ranks_that_add_up_different_sizes_break_the_group(others):
    """One of them is in another call; a sum of both would be wrong, and nobody would notice."""
    with new_group(2) as (group, fd):
        others[0].begin(one_sum, fd, 1, 2)
        with pytest.raises(
            ExecutionError, match=r"disagree about a step: one adds up (7|10) numbers, the other (7|10)"
        ):
            group.all_reduce(torch.zeros(7))
        others[0].has_joined()
        assert "disagree about a step" in others[0].result()


def test_messages_that_nobody_receives_end_at_the_limit():
    with new_group(2, limit_s=0.1) as (group, _), pytest.raises(ExecutionError, match="rank 1 did not answer"):
        group.send(bytes(5_000_000))


def test_a_rank_that_waits_for_a_message_sleeps(others):
    with new_group(2) as (group, fd):
        others[0].begin(one_message, fd, 1, 2)
        others[0].has_joined()
        before = switches(others[0])
        # It looks around now and then. One that spins never goes to sleep.
        while switches(others[0]) < before + 5:
            os.sched_yield()
        one_message(group)
        assert others[0].result() == ""


def test_a_rank_that_has_left_refuses_every_call():
    with new_group(2) as (group, _):
        group.close()
        group.close()
        for call in (lambda: group.all_reduce(torch.zeros(1)), lambda: group.send(b""), group.receive):
            with pytest.raises(ExecutionError, match="has left"):
                call()


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.all_reduce(torch.zeros(2, dtype=torch.float64)),
        lambda group: group.all_reduce(torch.zeros(4, 4)[:, :2]),
        lambda group: group.gather(torch.zeros(2, 3), [3], torch.zeros(2, 3)),
        lambda group: group.gather(torch.zeros(2, 3), [4, 3], torch.zeros(2, 7)),
        lambda group: group.gather(torch.zeros(2, 3), [3, 3], torch.zeros(2, 7)),
        lambda group: group.gather(torch.zeros(3, 2).T, [3, 3], torch.zeros(2, 6)),
        lambda group: group.gather(torch.zeros(2, 3), [3, 3], None),
        lambda group: group.gather(torch.zeros(2, 3), [3, -3], torch.zeros(2, 0)),
        lambda group: group.receive(),
    ],
)
def test_what_does_not_fit_is_refused(call):
    with new_group(2) as (group, _), pytest.raises(ValueError):
        call(group)


def test_groups_that_cannot_be_are_refused():
    for size in (0, 65):
        with pytest.raises(ValueError):
            SharedMemoryGroup.memory(size)
    with new_group(2) as (_, fd), pytest.raises(ValueError):
        SharedMemoryGroup.join(fd, 1, 2, 0.0)
    with new_group(2) as (_, fd), pytest.raises(ValueError):
        SharedMemoryGroup.join(fd, 2, 2, LIMIT_S)
    with new_group(2) as (_, fd), pytest.raises(ValueError, match="bytes"):
        SharedMemoryGroup.join(fd, 2, 3, LIMIT_S)


def test_without_the_native_kernels_there_is_no_group(monkeypatch):
    monkeypatch.setattr(cpu, "load", lambda: None)
    monkeypatch.setattr(cpu, "why_not", lambda: "the native extension does not load: gone")
    with pytest.raises(ConfigError, match="gone"):
        SharedMemoryGroup.memory(2)
