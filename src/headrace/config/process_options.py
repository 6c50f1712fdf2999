"""Which of the options about processes, ranks and replicas can be combined."""

from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config.server_args import ServerArgs

MAX_RANKS = 64


def check_processes(args: "ServerArgs") -> None:
    """Raises ConfigError if options contradict each other."""
    if args.num_replicas > 1 and args.single_process:
        raise ConfigError("--dp-size needs processes: it cannot be combined with --single-process")
    for name, size in (("--tp-size", args.tp_size), ("--pp-size", args.pp_size)):
        if size > 1 and args.single_process:
            raise ConfigError(f"{name} needs processes: it cannot be combined with --single-process")
    if args.numa_bind and args.single_process:
        raise ConfigError(
            "--numa-bind binds processes of the engine: it cannot be combined with --single-process, whose caller would be bound"
        )
    if args.numa_bind and args.device == "cuda":
        raise ConfigError("--numa-bind binds ranks that compute on the CPU: it cannot be combined with --device cuda")
    if args.num_ranks > MAX_RANKS:
        raise ConfigError(f"--tp-size times --pp-size may be at most {MAX_RANKS}, got {args.num_ranks}")
    if args.ep_size not in (1, args.tp_size):
        raise ConfigError(
            f"--ep-size must be 1 or the value of --tp-size ({args.tp_size}), whose ranks share the experts, got {args.ep_size}"
        )
    if args.enable_dp_attention:
        _check_dp_attention(args)
    if args.tokenizer_worker_num > 1 and args.single_process:
        raise ConfigError("--tokenizer-worker-num above 1 needs processes: it cannot be combined with --single-process")


def _check_dp_attention(args: "ServerArgs") -> None:
    option = "--enable-dp-attention"
    if args.tp_size == 1:
        raise ConfigError(f"{option} needs --tp-size: the ranks that requests are dealt to")
    if args.dp_size != args.tp_size:
        raise ConfigError(
            f"{option}: --dp-size is the number of ranks here, not of replicas: it must be the value of --tp-size, {args.tp_size}, got {args.dp_size}"
        )
    if args.pp_size > 1:
        raise ConfigError(f"{option} cannot be combined with --pp-size: use --tp-size alone")
    if args.lora_paths:
        raise ConfigError(f"{option} cannot be combined with --lora-paths: adapters are not supported with it")
