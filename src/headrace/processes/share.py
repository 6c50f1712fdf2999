"""How the ranks and replicas of a machine divide it."""

import dataclasses
import math
from collections.abc import Sequence

from headrace import cgroup
from headrace.config.machine import MEM_FRACTION
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.processes.numa import Binding, read_nodes


def share_of_machine(args: ServerArgs, bindings: Sequence[Binding] = ()) -> ServerArgs:
    """The options of one rank of one replica: cores and host memory are divided by the ranks and replicas here. GPUs are not.

    bindings: with --numa-bind, the one of this rank and then, in a leader, which decides on the KV cache, those of its followers. Such a rank
    has its share of its node, and no more memory than the node with the least room has for each. Raises ConfigError if it would run on a GPU.
    """
    shares = args.num_replicas * args.num_ranks // args.num_nodes
    if shares == 1 and not bindings:
        return args
    import torch

    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if on_gpu and bindings:
        raise ConfigError(
            "--numa-bind binds ranks that compute on the CPU, and this model would run on a GPU: add --device cpu"
        )
    fraction = args.mem_fraction_static
    if not on_gpu:
        fraction = (fraction or MEM_FRACTION["cpu"]) * _part_of_memory(shares, bindings)
    return dataclasses.replace(args, num_threads=_num_threads(args, shares, bindings), mem_fraction_static=fraction)


def _num_threads(args: ServerArgs, shares: int, bindings: Sequence[Binding]) -> int:
    from headrace.kernels.cpu import default_num_threads

    if args.num_threads is not None or not bindings:
        return max(1, (args.num_threads or default_num_threads()) // shares)
    own, quota = bindings[0], cgroup.quota_cpus()
    of_node = len(own.cores) // own.num_ranks
    return max(1, of_node if quota is None else min(of_node, math.ceil(quota) // shares))


def _part_of_memory(shares: int, bindings: Sequence[Binding]) -> float:
    """What a rank may use of the memory that is available here."""
    if not bindings:
        return 1 / shares
    import torch

    from headrace.execution.memory import available_bytes

    available = {node.number: node.available_bytes for node in read_nodes()}
    least = min(available[one.node] / one.num_ranks for one in bindings)
    return min(1 / shares, least / available_bytes(torch.device("cpu")))
