"""Options that need each other or exclude each other, where no other file of this room checks them."""

from typing import TYPE_CHECKING

from headrace.config.kv_events import read_kv_events
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config.server_args import ServerArgs


def check_combinations(args: "ServerArgs") -> None:
    """Raises ConfigError that names the options."""
    if read_kv_events(args.kv_events_config, args.num_replicas) is not None and args.disable_radix_cache:
        raise ConfigError("--kv-events-config needs the prefix cache: it cannot be combined with --disable-radix-cache")
    for option, value in (("--chunked-prefill-size", args.chunked_prefill_size), ("--max-step-ms", args.max_step_ms)):
        if value is not None and value != -1 and value < 1:
            raise ConfigError(f"{option} must be -1 or at least 1, got {value}")
    for option, given in (("--tokenizer-path", args.tokenizer_path), ("--chat-template", args.chat_template)):
        if args.skip_tokenizer_init and given is not None:
            raise ConfigError(f"{option} cannot be combined with --skip-tokenizer-init")
    if args.tokenizer_worker_num > 1 and args.max_stored_responses:
        raise ConfigError(
            "--max-stored-responses cannot be combined with --tokenizer-worker-num above 1: each worker would keep its own"
        )
    if args.cuda_graph_bs and args.cuda_graph_max_bs is not None:
        raise ConfigError("--cuda-graph-bs lists all sizes; leave --cuda-graph-max-bs out")
    if args.cuda_graph_bs and args.disable_cuda_graph:
        raise ConfigError("--cuda-graph-bs cannot be combined with --disable-cuda-graph")
    if args.page_size not in (None, 1, 16):
        raise ConfigError(f"--page-size must be 1 or 16, got {args.page_size}")
    if args.enable_priority_preemption and args.schedule_policy != "priority":
        raise ConfigError("--enable-priority-preemption needs --schedule-policy priority")
    if args.crash_dump_prompts and args.crash_dump_dir is None and args.dump_requests_dir is None:
        raise ConfigError("--crash-dump-prompts needs --crash-dump-dir or --dump-requests-dir")
    if args.log_requests_level and not args.log_requests:
        raise ConfigError(f"--log-requests-level {args.log_requests_level} needs --log-requests")
