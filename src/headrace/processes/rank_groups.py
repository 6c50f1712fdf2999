"""Who makes the `Group` of a rank: shared memory on one host, connections to node 0 with --nnodes. Ranks are numbered node by node."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.config.nodes import dist_secret, host_and_port
from headrace.config.server_args import ServerArgs
from headrace.distributed.base import Group
from headrace.distributed.shared_memory import SharedMemoryGroup
from headrace.errors import HeadraceError
from headrace.processes.handshake import RankStart
from headrace.processes.node_facts import node_facts

if TYPE_CHECKING:
    from headrace.distributed.network_follower import FollowerGroup


def ranks_here(args: ServerArgs) -> range:
    """The ranks of this host."""
    each = args.tp_size // args.num_nodes
    begin = each * (args.node_rank or 0)
    return range(begin, begin + each)


def lead(args: ServerArgs) -> tuple[Group, list[RankStart]]:
    """The leader's group, and what the followers of this host are given; their descriptors are closed once they have started.

    Over a network, the group is of use after `wait_for_ranks`. Raises ConfigError.
    """
    own = ranks_here(args)
    if args.num_nodes == 1:
        group, fd = SharedMemoryGroup.create(args.tp_size, args.rank_timeout_s)
        return group, [RankStart(rank, args.tp_size, fd) for rank in own[1:]]
    from headrace.distributed.network import Address, Member
    from headrace.distributed.network_leader import LeaderGroup

    assert args.dist_init_addr is not None
    member = Member(0, args.tp_size, node_facts(args))
    address = Address(*host_and_port(args.dist_init_addr))
    leader = LeaderGroup.listen(address, dist_secret(args, os.environ), member, args.rank_timeout_s)
    return leader, [RankStart(rank, args.tp_size) for rank in own[1:]]


@contextlib.contextmanager
def joined(args: ServerArgs, start: RankStart) -> Iterator[Group]:
    """A follower's group. Over a network, the others learn why this rank fails. Raises ConfigError or ExecutionError."""
    if start.group_fd is not None:
        group = SharedMemoryGroup.join(start.group_fd, start.rank, start.size, args.rank_timeout_s)
        os.close(start.group_fd)
        yield group
        group.close()
        return
    connected = connect(args, start.rank, node_facts(args))
    try:
        yield connected
    except HeadraceError as error:
        connected.break_up(error.message)
        raise
    except BaseException as error:
        connected.break_up(type(error).__name__)
        raise
    connected.close()


def connect(args: ServerArgs, rank: int | None, facts: dict[str, str]) -> "FollowerGroup":
    """The end of a process at node 0's group, once all ranks are there. rank: None = it only watches. Raises ConfigError or ExecutionError."""
    from headrace.distributed.network import Address, Member
    from headrace.distributed.network_follower import FollowerGroup

    assert args.dist_init_addr is not None
    return FollowerGroup.join(
        Address(*host_and_port(args.dist_init_addr)),
        dist_secret(args, os.environ),
        Member(rank, args.tp_size, facts),
        args.rank_timeout_s,
        args.dist_timeout,
    )
