"""The main process of `headrace serve --ray`: connects to Ray, or starts it, runs the replicas behind Ray Serve and waits for a signal.

Ray Serve (https://docs.ray.io/en/latest/serve/) places the replicas, balances between them and scales their number; its proxies speak HTTP.
"""

import dataclasses
import importlib.util
import os
import re
import signal
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

from headrace import log
from headrace.cluster.ray_proxy import MIDDLEWARES
from headrace.config.machine import most_running
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ExecutionError
from headrace.version import VERSION

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
    "session_dir": "a session would be open in one replica only",
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


logger = log.get_logger(__name__)

APP = "headrace"
"""Name of the application in Ray Serve."""
CHECK_S = 2.0
CONSTRUCTOR_TRIES = 2
AUTH = "RAY_AUTH_MODE"


class _Stopped(BaseException):
    """A signal came while the replicas start."""


def launch_on_ray(args: ServerArgs) -> int:
    """Serve until told to stop. Returns the exit code: 0 after a signal, 1 when the application failed.

    Raises ConfigError for options that cannot work, and ExecutionError when no replica starts.
    """
    plan = plan_replicas(args)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--ray needs Ray: pip install 'headrace[ray]'")
    log.configure(args.log_level, "main", args.log_format)
    stopping = threading.Event()
    starting = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopping.set()
        if starting:
            raise _Stopped

    _connect(args)
    starts_serve = not _serve_is_there(args)
    for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which has handlers of its own
        signal.signal(number, on_signal)
    try:
        _deploy(args, plan)
        starting = False
        logger.info("%s", ready_line(args, plan))
        while not stopping.wait(CHECK_S):
            if (failure := _failure()) is not None:
                logger.error("the application failed: %s", failure)
                return 1
        logger.info("stopping: running requests have %.0f s to finish", args.drain_timeout_s)
    except _Stopped:
        pass
    finally:
        starting = False
        _leave(starts_serve)
    return 0


def ready_line(args: ServerArgs, plan: ReplicaPlan) -> str:
    scheme = "https" if args.ssl_certfile else "http"
    least, most = args.ray_min_replicas, args.ray_max_replicas
    return (
        f"Headrace serves {args.served_name} on Ray; replicas: {least if least == most else f'{least} to {most}'}, "
        f"CPUs of each: {plan.num_cpus}, URL on each node that has one: {scheme}://{args.host}:{args.port}"
    )


def _connect(args: ServerArgs) -> None:
    """Connect to the cluster of --ray-address or of RAY_ADDRESS; without either, start one on this machine, which ends with this process.

    Ray's ports run code for whoever is let in, and some listen on all interfaces: a cluster of ours always asks for Ray's token.
    Raises ConfigError.
    """
    address = args.ray_address or os.environ.get("RAY_ADDRESS") or None
    if address is None and os.environ.setdefault(AUTH, "token") != "token":
        raise ConfigError(f"{AUTH} is {os.environ[AUTH]}: --ray starts Ray only with its tokens; unset the variable")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray  # reads these variables

    try:
        ray.init(
            address=address or "local", include_dashboard=False if address is None else None, configure_logging=False
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--ray-address {address or 'local'}: {error}") from error
    if address is not None and os.environ.get(AUTH) != "token":
        logger.warning(
            "the Ray cluster at %s may be open: whoever reaches its ports can run code; see %s", address, AUTH
        )


def _serve_is_there(args: ServerArgs) -> bool:
    """Whether Ray Serve runs on the cluster already. Raises ConfigError if it listens elsewhere, or has an application of another server of ours."""
    from ray import serve
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return False
    if APP in serve.status().applications:
        raise ConfigError(
            f"an application {APP!r} runs on this Ray cluster already; if its `headrace serve` has gone, end it with `serve shutdown`"
        )
    there = client.http_config
    if (there.host, there.port) != (args.host, args.port):
        raise ConfigError(
            f"Ray Serve runs on this cluster already and listens on {there.host}:{there.port}; give these as --host and --port, "
            "or end it with `serve shutdown`"
        )
    return True


def deployment_options(args: ServerArgs, plan: ReplicaPlan) -> dict[str, Any]:
    """Options of the deployment in Ray Serve: resources and place of a replica, and how their number follows the load.

    A replica never refuses to take a request over: its own queue does, with a 503, so that its health is answered meanwhile.
    """
    place = {"max_replicas_per_node": 1} if args.ray_placement == "strict_spread" else {}
    return place | {
        "ray_actor_options": {"num_cpus": plan.num_cpus, "num_gpus": args.ray_num_gpus},
        "name": "EngineReplica",
        "max_ongoing_requests": most_running(args) + args.max_queued_requests,
        "max_constructor_retry_count": CONSTRUCTOR_TRIES,
        "graceful_shutdown_timeout_s": args.drain_timeout_s + 10,
        "autoscaling_config": {
            "min_replicas": args.ray_min_replicas,
            "max_replicas": args.ray_max_replicas,
            "target_ongoing_requests": args.ray_target_ongoing_requests,
        },
    }


def controller_options(args: ServerArgs) -> dict[str, Any]:
    """Options of Ray Serve's controller; the proxies that it starts have its environment."""
    variables = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARES}
    if args.ray_placement == "pack":
        # Serve spreads replicas over the nodes unless its controller has this variable.
        variables["RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY"] = "1"
    return {"runtime_env": {"env_vars": variables}}


def _deploy(args: ServerArgs, plan: ReplicaPlan) -> None:
    """Start Ray Serve's proxies and the replicas, and wait until they are ready. Raises ConfigError and ExecutionError."""
    from ray import serve

    from headrace.cluster.ray_replica import EngineReplica

    http = {
        "host": args.host,
        "port": args.port,
        "keep_alive_timeout_s": args.keep_alive_timeout_s,
        "ssl_certfile": args.ssl_certfile,
        "ssl_keyfile": (args.ssl_keyfile or args.ssl_certfile),
    }
    serve.start(proxy_location="EveryNode", http_options=http, controller_options=controller_options(args))
    deployment = serve.deployment(**deployment_options(args, plan))(serve.ingress()(EngineReplica))
    try:
        serve.run(deployment.bind(VERSION, plan.options), name=APP, route_prefix="/")
    except RuntimeError as error:
        raise ExecutionError(f"no replica started on Ray: {_failure() or cause(str(error))}") from error


def _failure() -> str | None:
    """Why the application has failed for good; None while it has not. A replica that died is replaced, and is no failure."""
    from ray import serve
    from ray.exceptions import RayError

    try:
        app = serve.status().applications.get(APP)
    except RayError as error:
        return f"Ray does not answer: {cause(str(error))}"
    if app is None:
        return "it was deleted"
    if app.status != "DEPLOY_FAILED":
        return None
    told = [cause(deployment.message) for deployment in app.deployments.values()]
    return "; ".join(filter(None, told)) or app.message


def cause(text: str) -> str:
    """What an error of ours says in the traceback that Ray shows of it, else the last line of the text."""
    ours = re.findall(r"^headrace\.errors\.\w+: (.+)$", text, re.MULTILINE)
    return str(ours[-1]) if ours else text.strip().rpartition("\n")[2]


def _leave(starts_serve: bool) -> None:
    """End our application; also Ray Serve if it was started here and runs nothing else. Replicas let running requests finish."""
    import ray
    from ray import serve
    from ray.exceptions import RayError

    try:
        serve.delete(APP)
        if starts_serve and not serve.status().applications:
            serve.shutdown()
    except RayError as error:
        logger.warning("the application could not be ended: %s", cause(str(error)))
    ray.shutdown()
