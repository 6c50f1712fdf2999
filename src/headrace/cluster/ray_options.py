"""What of the options works with --ray, and what a replica is given. Knows nothing of ray itself. Pure functions; any process."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError

_DEFAULTS = ServerArgs()

NOT_WITH_RAY = {
    "single_process": "an engine needs processes of its own beside Ray's",
    "tokenizer_worker_num": "Ray Serve has proxies that read requests; use --ray-max-replicas for more processes",
    "nnodes": "all ranks of a replica are on its node",
    "node_rank": "all ranks of a replica are on its node",
    "dist_init_addr": "all ranks of a replica are on its node",
    "dist_secret_file": "all ranks of a replica are on its node",
    "numa_bind": "replicas on one node would be bound to the same part of it",
    "max_stored_responses": "each replica would keep its own",
    "max_sessions": "a session would be open in one replica only",
    "max_session_tokens": "a session would be open in one replica only",
    "session_timeout_s": "a session would be open in one replica only",
    "kv_events_config": "replicas on one node would publish at the same address",
    "max_stream_buffer_bytes": "Ray Serve's proxy buffers the streams",
    "save_dir": "/save_sharded_state would reach one replica only",
    "profile_dir": "/start_profile would reach one replica only",
    "dump_requests_dir": "/dump_requests would reach one replica only",
    "enable_fault_injection": "/inject_fault would reach one replica only",
    "metrics_compat": "/metrics would reach one replica only",
}
"""Options that cannot work with --ray, each with the reason."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """What each replica gets. num_cpus: that it reserves in Ray. options: of `ServerArgs`, of its engine and its application."""

    num_cpus: int
    options: dict[str, Any]


def plan_replicas(args: ServerArgs, num_cores: int | None = None) -> ReplicaPlan:
    """Raises ConfigError, which names the option, for what cannot work with --ray. num_cores: of this machine; default: that this process may use."""
    for name, reason in NOT_WITH_RAY.items():
        if getattr(args, name) != getattr(_DEFAULTS, name):
            raise ConfigError(f"--{name.replace('_', '-')} cannot be combined with --ray: {reason}")
    if args.port == 0:
        raise ConfigError("--port 0 cannot be combined with --ray: every node listens on the same port, so choose one")
    if (args.ray_address or "").startswith("ray://"):
        raise ConfigError(
            f"--ray-address {args.ray_address} is for Ray's client; give HOST:PORT of the cluster, or auto on one of its nodes"
        )
    if args.ray_min_replicas > args.ray_max_replicas:
        raise ConfigError(
            f"--ray-min-replicas {args.ray_min_replicas} is more than --ray-max-replicas {args.ray_max_replicas}"
        )
    if num_cores is None:
        num_cores = len(os.sched_getaffinity(0))
    num_cpus = args.ray_num_cpus or args.num_threads or max(1, num_cores // args.ray_max_replicas)
    own = {field.name: field.default for field in dataclasses.fields(args) if field.metadata["group"] == "Ray"}
    # Serve's proxies have the address, and the certificate, that clients see.
    own |= {"ssl_certfile": None, "ssl_keyfile": None, "num_threads": args.num_threads or num_cpus, "nnodes": 1}
    options = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)} | own
    return ReplicaPlan(num_cpus, options)
