"""How the ranks of a model are connected: by shared memory on one host, by connections to node 0 with --nnodes.

One group of all ranks for plans; with --pp-size, also a group for the ranks of each stage, and a link from each rank to the one with the same
part of the next stage. Rank r is rank r % tp_size of stage r // tp_size. With --nnodes, ranks are numbered node by node, and a stage is on
one node: its group is shared memory, and only links lead to other nodes. Without stages, the one group spans the nodes. Nodes that join must have
the same facts as node 0 (`node_facts`).
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from headrace.checkpoint.weight_cache import content_of, files_fingerprint
from headrace.config.machine import dist_secret, host_and_port
from headrace.config.server_args import ServerArgs
from headrace.distributed.base import ALL_LAYERS, HALVES_FROM, WHOLE, Group, Receiver, Sender, Shard, Stage
from headrace.distributed.one_host import SharedMemoryGroup, SocketReceiver, SocketSender, socket_link
from headrace.distributed.rank import Rank
from headrace.errors import ConfigError, HeadraceError, ModelError
from headrace.execution.model_source import open_model
from headrace.log import get_logger
from headrace.processes.handshake import RankStart
from headrace.processes.numa import Binding
from headrace.version import VERSION

if TYPE_CHECKING:
    from headrace.distributed.network import Address, NetworkGroup
    from headrace.distributed.network_follower import FollowerGroup

logger = get_logger(__name__)

NAME_S = 1.0

_GROUPS = frozenset({"Model", "Adapters", "Memory and schedule", "Kernels"})
_OF_EACH_HOST = frozenset({
    "model_path", "tokenizer_path", "served_model_name", "chat_template", "tool_call_parser", "reasoning_parser", "sampling_defaults",
    "disable_weight_cache", "lora_paths", "num_threads", "numa_bind", "mem_fraction_static", "skip_tokenizer_init",
})  # fmt: skip
"""Paths, shares of a machine, and what only node 0 reads."""
_OF_ALL = ("tp_size", "ep_size", "pp_size", "nnodes", "rank_timeout_s")


def ranks_here(args: ServerArgs) -> range:
    each = args.num_ranks // args.num_nodes
    begin = each * (args.node_rank or 0)
    return range(begin, begin + each)


def starts_here(args: ServerArgs, places: Sequence[Binding] = ()) -> list[RankStart]:
    """What each rank of this host is given. Descriptors are closed once they are inherited or, those of links, joined. places: of the ranks,
    with --numa-bind.

    Raises ConfigError without the native kernels, OSError if there are no descriptors left.
    """
    tp_size, here = args.tp_size, ranks_here(args)
    group_fd = SharedMemoryGroup.memory(args.num_ranks) if args.num_nodes == 1 else None
    place_of = dict(zip(here, places, strict=bool(places)))
    if args.pp_size == 1:
        return [RankStart(rank, group_fd, binding=place_of.get(rank)) for rank in here]
    shard_fds, before_fds, after_fds = dict[int, int](), dict[int, int](), dict[int, int]()
    if tp_size > 1:
        shard_fds = {stage: SharedMemoryGroup.memory(tp_size) for stage in {rank // tp_size for rank in here}}
    for rank in here:
        if (following := _following(args, rank)) in here:
            after_fds[rank], before_fds[following] = socket_link()
    return [
        RankStart(
            rank,
            group_fd,
            shard_fds.get(rank // tp_size),
            before_fds.get(rank),
            after_fds.get(rank),
            place_of.get(rank),
        )
        for rank in here
    ]


def _following(args: ServerArgs, rank: int) -> int:
    """The rank of the next stage that has the same part of its layers. The first stage comes after the last."""
    return (rank + args.tp_size) % args.num_ranks


def descriptors_of(starts: Iterable[RankStart]) -> set[int]:
    return {fd for start in starts for fd in start.descriptors}


@contextlib.contextmanager
def joined(args: ServerArgs, start: RankStart) -> Iterator[Rank]:
    """The rank, connected to the others until the end. Its links' descriptors are its own from now on; those of groups may be closed.

    Over a network the leader's group is of use after `wait_for_ranks`. Raises ConfigError or ExecutionError.
    """
    limit_s, shard, stage = args.rank_timeout_s, WHOLE, ALL_LAYERS
    stage_index, shard_index = divmod(start.rank, args.tp_size)
    halves_from = HALVES_FROM if args.enable_two_batch_overlap else 0
    with contextlib.ExitStack() as resources:
        network, group = _group_of_all(args, start)
        resources.callback(group.close)
        if args.pp_size > 1:
            before, after = _receiver(args, start, network), _sender(args, start, network)
            resources.callback(before.close)
            resources.callback(after.close)
            stage = Stage(stage_index, args.pp_size, before, after)
        if start.shard_fd is not None:
            of_stage = SharedMemoryGroup.join(start.shard_fd, shard_index, args.tp_size, limit_s)
            resources.callback(of_stage.close)
            shard = Shard(shard_index, args.tp_size, of_stage, halves_from)
        elif args.tp_size > 1:
            shard = Shard(shard_index, args.tp_size, group, halves_from)
        yield Rank(shard, stage, group)


@contextlib.contextmanager
def joined_follower(args: ServerArgs, start: RankStart) -> Iterator[Rank]:
    """`joined`, in a follower's process. Over a network, the others learn why it fails. Raises ConfigError or ExecutionError."""
    with joined(args, start) as rank:
        for fd in start.of_groups:
            os.close(fd)
        assert rank.group is not None, start
        try:
            yield rank
        except BaseException as error:
            if rank.group.spans_hosts:
                rank.group.break_up(error.message if isinstance(error, HeadraceError) else type(error).__name__)
            raise


def _group_of_all(args: ServerArgs, start: RankStart) -> "tuple[NetworkGroup | None, Group]":
    """The group of all ranks, twice; the first is None if it is shared memory."""
    if start.group_fd is not None:
        return None, SharedMemoryGroup.join(start.group_fd, start.rank, args.num_ranks, args.rank_timeout_s)
    network = connect(args, start.rank, node_facts(args)) if start.rank else _listen(args)
    return network, network


def _receiver(args: ServerArgs, start: RankStart, network: "NetworkGroup | None") -> Receiver:
    """From the stage before, on this host or another."""
    if start.before_fd is not None:
        return SocketReceiver(start.before_fd, args.rank_timeout_s)
    from headrace.distributed.network import NetworkReceiver

    assert network is not None, start
    return NetworkReceiver(network)


def _sender(args: ServerArgs, start: RankStart, network: "NetworkGroup | None") -> Sender:
    """To the next stage, on this host or another."""
    if start.after_fd is not None:
        return SocketSender(start.after_fd, args.rank_timeout_s)
    from headrace.distributed.network import NetworkSender

    assert network is not None, start
    return NetworkSender(network, _following(args, start.rank))


def _listen(args: ServerArgs) -> "NetworkGroup":
    from headrace.distributed.network import Address, Member
    from headrace.distributed.network_leader import LeaderGroup

    assert args.dist_init_addr is not None
    member = Member(0, args.num_ranks, node_facts(args))
    address = Address(*host_and_port(args.dist_init_addr))
    _wait_for_name(address, args.dist_timeout)
    group = LeaderGroup.listen(address, dist_secret(args, os.environ), member, args.rank_timeout_s)
    if args.pp_size > 1 and args.num_ranks > 2:  # of two ranks, both links are the leader's own
        group.pass_on()
    return group


def _wait_for_name(address: "Address", limit_s: float) -> None:
    """The name of a pod may be known only some time after it has started. Raises ConfigError when it is not after limit_s."""
    from headrace.distributed.network import endpoint

    end_s = time.monotonic() + limit_s
    is_told = False
    while True:
        try:
            endpoint(address)
            return
        except ConfigError as error:
            if time.monotonic() > end_s:
                raise
            if not is_told:
                logger.warning("%s; waiting for it", error.message)
            is_told = True
        time.sleep(NAME_S)


def connect(args: ServerArgs, rank: int | None, facts: dict[str, str]) -> "FollowerGroup":
    """The end of a process at node 0's group, once all ranks are there. rank: None = it only watches. Raises ConfigError or ExecutionError."""
    from headrace.distributed.network import Address, Member
    from headrace.distributed.network_follower import FollowerGroup

    assert args.dist_init_addr is not None
    return FollowerGroup.join(
        Address(*host_and_port(args.dist_init_addr)),
        dist_secret(args, os.environ),
        Member(rank, args.num_ranks, facts),
        args.rank_timeout_s,
        args.dist_timeout,
    )


def node_facts(args: ServerArgs) -> dict[str, str]:
    """What must be the same on all hosts: the version, the options that change what is computed, and the model's files; by the name that people
    know it by. Raises ModelError if the model cannot be read.
    """
    options = [
        field.name
        for field in dataclasses.fields(args)
        if field.name in _OF_ALL or (field.metadata["group"] in _GROUPS and field.name not in _OF_EACH_HOST)
    ]
    return {
        "the version of Headrace": VERSION,
        "the byte order": sys.byteorder,
        **{f"--{name.replace('_', '-')}": str(getattr(args, name)) for name in options},
        "the model (a hash of its files)": _model(args),
    }


def _model(args: ServerArgs) -> str:
    """Of its weights and its config, or of the config alone if the weights are random."""
    checkpoint = open_model(args)
    try:
        return content_of(files_fingerprint(checkpoint.files(), {"config": checkpoint.config.as_file()}))
    except OSError as error:
        raise ModelError(f"{checkpoint.path.name} cannot be read: {error.strerror}") from error
    finally:
        checkpoint.release()
