"""Links between stages over the network: order, whatever else ranks tell each other, and what becomes of the ends when a rank is lost."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch
from cut_link import Link
from rank_harness import (
    FACTS,
    HOST,
    LIMIT_S,
    SECRET,
    ends_of,
    network_leader,
    one_hidden,
    one_message,
    ring,
)

from headrace.distributed.network import Address, Member, NetworkGroup
from headrace.distributed.network_follower import FollowerGroup
from headrace.errors import ExecutionError

SHAPES = [(1, 4), (0, 4), (3, 576), (2048, 1024), (2, 1), (700, 576)]


@pytest.fixture
def caller() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@contextmanager
def whole_group(size: int, caller: ThreadPoolExecutor) -> Iterator[list[NetworkGroup]]:
    """Every rank of a group, in this process."""
    with network_leader(size) as leader, ExitStack() as followers:
        leader.pass_on()
        address = Address(HOST, leader.port)
        joining = [
            caller.submit(FollowerGroup.join, address, SECRET, Member(rank, size, FACTS), LIMIT_S, LIMIT_S)
            for rank in range(1, size)
        ]
        leader.wait_for_ranks(LIMIT_S)
        yield [leader, *(followers.enter_context(one.result(LIMIT_S)) for one in joining)]


def hidden(index: int) -> torch.Tensor:
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("sender", [0, 1, 2])
def test_what_is_sent_arrives_in_order_though_nobody_receives_yet(sender: int, caller):
    """From the leader, to the leader, and between two others, while the leader makes no calls."""
    with whole_group(3, caller) as ranks:
        _, after = ends_of(ranks[sender])
        for _ in range(2):
            for index in range(len(SHAPES)):
                after.send(hidden(index))

        before, _ = ends_of(ranks[(sender + 1) % 3])
        for _ in range(2):
            for index, (rows, _) in enumerate(SHAPES):
                assert torch.equal(before.receive(rows), hidden(index))


@pytest.mark.parametrize("size", [2, 4])
def test_steps_in_flight_and_calls_of_the_group_do_not_disturb_each_other(size: int, others):
    with network_leader(size) as group:
        group.pass_on()
        for rank in range(1, size):
            others[rank - 1].begin_over_network(ring, group.port, rank, size)
        group.wait_for_ranks(LIMIT_S)
        ring(group)
        for process in others[: size - 1]:
            process.has_joined()
            assert process.result() == ""


def test_hidden_states_wait_while_others_are_asked_and_calls_while_hidden_states_are_waited_for(caller):
    with whole_group(2, caller) as (leader, follower):
        _, to_follower = ends_of(leader)
        to_follower.send(hidden(0))
        leader.send(b"first")
        to_follower.send(hidden(2))
        leader.send(b"second")

        before, to_leader = ends_of(follower)
        assert follower.receive() == b"first"
        assert torch.equal(before.receive(1), hidden(0))
        assert torch.equal(before.receive(3), hidden(2))
        assert follower.receive() == b"second"

        to_leader.send(hidden(0))
        asking = caller.submit(follower.all_reduce, torch.ones(3))
        total = torch.ones(3)
        leader.all_reduce(total)
        asking.result(LIMIT_S)
        assert total.tolist() == [2.0] * 3
        assert torch.equal(ends_of(leader)[0].receive(1), hidden(0))


def test_ranks_that_are_not_at_the_same_step_are_noticed(caller):
    with whole_group(2, caller) as (leader, follower):
        ends_of(leader)[1].send(torch.zeros(3, 8))
        with pytest.raises(ExecutionError, match="3 rows in place of 2"):
            ends_of(follower)[0].receive(2)


def test_a_rank_that_is_killed_ends_the_waits_at_links(others, victim, caller):
    (waiting, *_), size = others, 3
    with network_leader(size) as group:
        group.pass_on()
        victim.begin_over_network(one_message, group.port, 2, size)
        waiting.begin_over_network(one_hidden, group.port, 1, size)
        group.wait_for_ranks(LIMIT_S)
        victim.has_joined()
        waiting.has_joined()
        before, after = ends_of(group)
        receiving = caller.submit(before.receive, 1)
        victim.kill()
        with pytest.raises(ExecutionError, match=r"rank 2 on .* is lost: its process has ended"):
            receiving.result(LIMIT_S)
        assert "rank 2 on" in waiting.result()
        with pytest.raises(ExecutionError, match="rank 2 on"):
            after.send(hidden(0))


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_is_stopped_ends_the_wait_for_its_hidden_states(victim, caller):
    with network_leader(2) as group:
        victim.begin_over_network(one_message, group.port, 1, 2)
        group.wait_for_ranks(LIMIT_S)
        victim.has_joined()
        receiving = caller.submit(ends_of(group)[0].receive, 1)
        os.kill(victim.pid, signal.SIGSTOP)
        with pytest.raises(ExecutionError, match="nothing came from it for"):
            receiving.result(LIMIT_S)


@pytest.mark.usefixtures("impatient")
def test_a_cut_link_is_noticed_on_both_sides_and_nobody_reads_what_went_through_it(caller):
    with network_leader(2) as leader:
        link = Link(leader.port)
        try:
            address = Address(HOST, link.port)
            joining = caller.submit(FollowerGroup.join, address, SECRET, Member(1, 2, FACTS), LIMIT_S, LIMIT_S)
            leader.wait_for_ranks(LIMIT_S)
            with joining.result(LIMIT_S) as follower:
                sent = torch.full((64, 64), 3.25)
                ends_of(leader)[1].send(sent)
                assert torch.equal(ends_of(follower)[0].receive(64), sent)
                assert sent.numpy().tobytes()[:64] not in link.seen

                receiving = [caller.submit(ends_of(rank)[0].receive, 1) for rank in (leader, follower)]
                link.cut()
                with pytest.raises(ExecutionError, match=r"rank 1 on .* is lost"):
                    receiving[0].result(LIMIT_S)
                with pytest.raises(ExecutionError, match="the connection to rank 0 is lost"):
                    receiving[1].result(LIMIT_S)
        finally:
            link.close()


def test_a_sender_learns_why_the_group_has_ended(caller):
    with whole_group(2, caller) as (leader, follower):
        leader.break_up("a cosmic ray")

        def send_until_it_fails() -> None:
            _, after = ends_of(follower)
            while True:
                after.send(hidden(0))

        with pytest.raises(ExecutionError, match="a cosmic ray"):
            caller.submit(send_until_it_fails).result(LIMIT_S)
