"""Collectives of ranks over TCP: every rank gets the same bits, strangers stay out, and whatever is lost ends every wait with its reason."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from cut_link import Link
from rank_harness import (
    FACTS,
    HOST,
    LIMIT_S,
    SECRET,
    gathers,
    messages,
    mixed,
    network_leader,
    one_gather,
    one_message,
    one_sum,
    peaks,
    sums,
)

from headrace.distributed import network, network_follower
from headrace.distributed.network import Address, Member
from headrace.distributed.network_follower import FollowerGroup
from headrace.distributed.network_leader import LeaderGroup
from headrace.errors import ConfigError, ExecutionError


@pytest.fixture
def caller() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def join(
    leader_or_port: LeaderGroup | int,
    rank: int | None,
    size: int,
    secret: bytes = SECRET,
    facts: dict[str, str] = FACTS,
    limit_s: float = LIMIT_S,
) -> FollowerGroup:
    port = leader_or_port if isinstance(leader_or_port, int) else leader_or_port.port
    return FollowerGroup.join(Address(HOST, port), secret, Member(rank, size, facts), limit_s, LIMIT_S)


def failure(group: LeaderGroup | FollowerGroup) -> str:
    """Wait until the group notices that it is broken; why."""
    return wait_for(group.failure)


def wait_for(look: Callable[[], Any]) -> Any:
    """What `look` returns when it is not None any more."""
    end_s = time.monotonic() + LIMIT_S
    while (found := look()) is None:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return found


def joined(group: LeaderGroup, joining: "list[Future[FollowerGroup]]") -> list[FollowerGroup]:
    """Wait until all have joined, while the leader looks who comes."""
    group.wait_for_ranks(LIMIT_S)

    def look() -> bool | None:
        assert group.failure() is None
        return True if all(one.done() for one in joining) else None

    wait_for(look)
    return [one.result() for one in joining]


@pytest.mark.parametrize("task", [sums, gathers, messages, mixed, peaks], ids=lambda task: task.__name__)
@pytest.mark.parametrize("size", [2, 4])
def test_what_ranks_tell_each_other_is_the_same_in_each(size, task, others):
    with network_leader(size) as group:
        for rank in range(1, size):
            others[rank - 1].begin_over_network(task, group.port, rank, size)
        group.wait_for_ranks(LIMIT_S)
        task(group)
        for process in others[: size - 1]:
            process.has_joined()
            assert process.result() == ""


@pytest.mark.parametrize("task", [one_sum, one_gather, one_message], ids=lambda task: task.__name__)
def test_a_rank_that_is_killed_ends_the_waits_of_the_others(task, others, victim, caller):
    (waiting, *_), size = others, 3
    with network_leader(size) as group:
        victim.begin_over_network(one_message, group.port, 2, size)
        waiting.begin_over_network(one_sum, group.port, 1, size)
        group.wait_for_ranks(LIMIT_S)
        victim.has_joined()  # and waits for a message
        waiting.has_joined()
        if task is one_message:
            victim.kill()
            reason = failure(group)
        else:
            own = caller.submit(task, group)
            victim.kill()
            with pytest.raises(ExecutionError) as error:
                own.result(LIMIT_S)
            reason = error.value.message
        assert f"rank 2 on {socket.gethostname()} is lost: its process has ended" in reason
        assert "rank 2 on" in waiting.result()
        with pytest.raises(ExecutionError, match="rank 2 on"):
            group.send(b"")


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_is_stopped_is_noticed_also_between_calls(others, victim):
    (waiting, *_), size = others, 3
    with network_leader(size) as group:
        victim.begin_over_network(one_message, group.port, 2, size)
        waiting.begin_over_network(one_message, group.port, 1, size)
        group.wait_for_ranks(LIMIT_S)
        victim.has_joined()
        waiting.has_joined()
        assert group.failure() is None
        os.kill(victim.pid, signal.SIGSTOP)
        assert "nothing came from it for" in failure(group)
        assert "rank 2 on" in waiting.result()


@pytest.mark.usefixtures("impatient")
def test_a_cut_link_is_noticed_on_both_sides(caller):
    with network_leader(2) as group:
        link = Link(group.port)
        try:
            joining = caller.submit(join, link.port, 1, 2)
            group.wait_for_ranks(LIMIT_S)
            with joining.result(LIMIT_S) as follower:
                receiving = caller.submit(follower.receive)
                group.send(b"a word that must not be read on the way")
                assert receiving.result(LIMIT_S) == b"a word that must not be read on the way"
                assert b"must not be read" not in link.seen
                receiving = caller.submit(follower.receive)
                link.cut()
                with pytest.raises(ExecutionError, match="the connection to rank 0 is lost"):
                    receiving.result(LIMIT_S)
                assert "rank 1 on" in failure(group)
        finally:
            link.close()


def test_a_rank_that_does_not_answer_in_time_breaks_the_group(caller):
    with network_leader(2, limit_s=0.1) as group:
        joining = caller.submit(join, group, 1, 2)
        group.wait_for_ranks(LIMIT_S)
        with joining.result(LIMIT_S) as follower:
            with pytest.raises(ExecutionError, match=r"rank 1 on .* did not answer within 0.1 s"):
                group.all_reduce(torch.zeros(3))
            with pytest.raises(ExecutionError, match="did not answer within"):
                follower.receive()


def test_a_leader_that_does_not_answer_in_time_breaks_the_group(caller):
    with network_leader(2) as group:
        joining = caller.submit(join, group, 1, 2, limit_s=0.1)
        group.wait_for_ranks(LIMIT_S)
        with joining.result(LIMIT_S) as follower:
            with pytest.raises(ExecutionError, match="rank 0 did not answer within"):
                follower.all_reduce(torch.zeros(3))
            assert "rank 0 did not answer" in failure(group)


def test_what_a_rank_says_when_it_breaks_up_is_what_all_hear(caller):
    with network_leader(3) as group:
        first, second = joined(group, [caller.submit(join, group, rank, 3) for rank in (1, 2)])
        with first, second:
            hearing = caller.submit(second.receive)
            first.break_up("a cosmic ray")
            assert f"rank 1 on {socket.gethostname()}: a cosmic ray" in failure(group)
            with pytest.raises(ExecutionError, match=r"rank 1 on .*: a cosmic ray"):
                hearing.result(LIMIT_S)


def test_ranks_that_are_not_at_the_same_call_break_the_group(caller):
    with network_leader(2) as group:
        joining = caller.submit(join, group, 1, 2)
        group.wait_for_ranks(LIMIT_S)
        with joining.result(LIMIT_S) as follower:
            asking = caller.submit(follower.all_reduce, torch.zeros(4))
            with pytest.raises(ExecutionError, match="rank 1 sent call 1"):
                group.all_reduce(torch.zeros(5))
            with pytest.raises(ExecutionError, match="rank 1 sent call 1"):
                asking.result(LIMIT_S)


def refused(joining: "Future[FollowerGroup]") -> str:
    with pytest.raises(ConfigError) as error:
        joining.result(LIMIT_S)
    return error.value.message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"secret": b"another secret of tests"}, "the same secret"),
        ({"facts": {"the model": "large"}}, "the model is tiny there and large here"),
        ({"facts": {**FACTS, "--dtype": "float32"}}, "--dtype is not known there and float32 here"),
        ({"size": 3}, "rank 1 of 3, in a group of 2"),
        ({"rank": 2}, "rank 2 of 2, in a group of 2"),
    ],
    ids=["secret", "model", "option", "size", "rank"],
)
def test_who_does_not_belong_is_refused_with_the_reason_and_the_leader_waits_on(
    options: dict[str, Any], said: str, caller, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(network_follower, "_FAILING_S", 0.0)
    with network_leader(2) as group:
        strange = caller.submit(lambda: join(group, **{"rank": 1, "size": 2, **options}))
        waiting = caller.submit(group.wait_for_ranks, LIMIT_S)
        assert said in refused(strange)
        with join(group, 1, 2):
            waiting.result(LIMIT_S)


def test_strangers_at_the_port_do_no_harm(caller):
    with network_leader(2) as group:
        plain = socket.create_connection((HOST, group.port))
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)  # without keys
        stranger.connect(f"tcp://{HOST}:{group.port}")
        stranger.send(b"hello")
        joining = caller.submit(join, group, 1, 2)
        group.wait_for_ranks(LIMIT_S)
        plain.close()
        context.destroy(linger=0)
        with joining.result(LIMIT_S) as follower:
            assert group.failure() is None
            receiving = caller.submit(follower.receive)
            group.send(b"all is well")
            assert receiving.result(LIMIT_S) == b"all is well"


def test_nobody_waits_for_a_network_that_does_not_come_to_its_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "_LAST_WORDS_S", 0.0)
    monkeypatch.setattr(network, "_ENDING_S", 0.1)
    closed, released = threading.Event(), threading.Event()
    context = SimpleNamespace(term=released.wait)
    network.end(context, SimpleNamespace(close=lambda linger: closed.set()))
    assert closed.is_set()
    released.set()


def test_ranks_that_are_missing_are_named():
    with network_leader(4) as group, pytest.raises(ExecutionError, match=r"rank 1, 2, 3 did not join within 0.1 s"):
        group.wait_for_ranks(0.1)


def test_a_follower_says_that_nobody_listens():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ExecutionError, match=r"not whole after 0.1 s: nothing listens there"):
        FollowerGroup.join(Address(HOST, port), SECRET, Member(1, 2, FACTS), LIMIT_S, 0.1)


def test_an_address_that_is_taken_or_not_ours_is_refused():
    with network_leader(2) as group:
        for address in (Address(HOST, group.port), Address("192.0.2.1", 1), Address("nowhere.invalid", 1)):
            with pytest.raises(ConfigError, match="--dist-init-addr"):
                LeaderGroup.listen(address, SECRET, Member(0, 2, FACTS), LIMIT_S)


@pytest.mark.parametrize("ends_well", [True, False])
def test_who_watches_learns_how_the_group_ends(ends_well: bool, caller):
    with network_leader(2) as group:
        watcher, follower = joined(group, [caller.submit(join, group, rank, 2) for rank in (None, 1)])
        with watcher, follower:
            assert watcher.failure() is None
            if ends_well:
                group.close()
            else:
                group.break_up("no more")
            assert failure(watcher) == ("rank 0 has ended" if ends_well else "no more")
            assert watcher.has_ended == ends_well


def test_a_follower_may_end_before_its_leader(caller):
    """The leader has told it that there is no more, and looks once more whether the ranks are there before it leaves."""
    with network_leader(2) as group:
        watcher, follower = joined(group, [caller.submit(join, group, rank, 2) for rank in (None, 1)])
        with watcher:
            follower.close()
            for _ in range(20):
                assert group.failure() is None
                time.sleep(0.01)
            group.close()
            assert (failure(watcher), watcher.has_ended) == ("rank 0 has ended", True)


def test_a_follower_that_comes_too_early_joins_the_next_group(caller, caplog: pytest.LogCaptureFixture):
    """The group is whole when it comes; its leader ends, and another one listens at the same address."""
    with network_leader(2) as group:
        joining = caller.submit(join, group, 1, 2)
        group.wait_for_ranks(LIMIT_S)
        address = Address(HOST, group.port)
        with joining.result(LIMIT_S):
            late = caller.submit(join, group, 1, 2)

            def is_sent_away() -> bool | None:
                assert group.failure() is None
                return True if "already has all of its ranks" in caplog.text else None

            wait_for(is_sent_away)
            group.break_up("enough")
    following = LeaderGroup.listen(address, SECRET, Member(0, 2, FACTS), LIMIT_S)
    following.wait_for_ranks(LIMIT_S)
    late.result(LIMIT_S).close()
    following.break_up("the test has ended")
