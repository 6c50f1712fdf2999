"""Whether a model can be split over ranks, and on which device each runs its part. Runs once, at start."""

import torch

from headrace.config.resolve import Config
from headrace.config.server_args import ServerArgs
from headrace.distributed.rank import Rank
from headrace.errors import ConfigError
from headrace.models.spec import ModelSpec


def check_can_be_split(args: ServerArgs, spec: ModelSpec, config: Config) -> None:
    """Raises ConfigError if several ranks cannot run the model."""
    option = "--tp-size above 1" if args.tp_size > 1 else "--pp-size above 1"
    if args.enable_dp_attention:
        option = "--enable-dp-attention"
    if spec.name == "transformers":
        raise ConfigError(f"{option}: this model runs through transformers' code, which is not split over ranks")
    if config.device == "cpu" and not config.native_kernels:
        raise ConfigError(f"{option} needs the native kernels")
    if args.enable_torch_compile:
        raise ConfigError(f"{option} cannot be combined with --enable-torch-compile")
    if config.device == "cpu":
        return
    for name, size in (("--pp-size", args.pp_size), ("--nnodes", args.num_nodes)):
        if size > 1:
            raise ConfigError(f"{name} above 1 works on CPUs only so far, and the device is {config.device}")
    if args.enable_dp_attention:
        raise ConfigError(f"{option} works on CPUs only so far, and the device is {config.device}")
    if config.deterministic:
        raise ConfigError(
            f"--enable-deterministic-inference cannot be combined with {option} on GPUs: the order of sums over ranks depends on the batch"
        )


def own_device(args: ServerArgs, config: Config, rank: Rank) -> torch.device:
    """Where this process runs its part of the model: rank r of a replica on the GPU with index r of those that the replica sees.

    Raises ConfigError if there are fewer GPUs than ranks.
    """
    if config.device == "cpu" or rank.group is None:
        return torch.device(config.device)
    count = torch.cuda.device_count()
    if count < args.tp_size:
        raise ConfigError(
            f"--tp-size {args.tp_size} needs {args.tp_size} GPUs, one for each rank, and {count} can be used here"
            f"{f' by each of --dp-size {args.dp_size} replicas' if args.num_replicas > 1 else ''}; see CUDA_VISIBLE_DEVICES"
        )
    device = torch.device(config.device, rank.number)
    torch.cuda.set_device(device)
    return device
