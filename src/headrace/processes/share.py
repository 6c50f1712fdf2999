"""How the ranks and replicas of a machine divide it."""

import dataclasses

from headrace.config.resolve import MEM_FRACTION
from headrace.config.server_args import ServerArgs


def share_of_machine(args: ServerArgs) -> ServerArgs:
    """The options of one rank of one replica: cores and host memory are divided by the ranks and replicas here. A GPU is not: each has its own."""
    shares = args.dp_size * args.num_ranks // args.num_nodes
    if shares == 1:
        return args
    import torch

    from headrace.kernels.cpu.threads import default_num_threads

    num_threads = max(1, (args.num_threads or default_num_threads()) // shares)
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    fraction = args.mem_fraction_static
    if not on_gpu:
        fraction = (fraction or MEM_FRACTION["cpu"]) / shares
    return dataclasses.replace(args, num_threads=num_threads, mem_fraction_static=fraction)
