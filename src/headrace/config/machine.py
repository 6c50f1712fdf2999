"""The machine, and those that run a model with it: what is checked before anything is loaded, and --nnodes.

Owns the checks of devices, memory and open files, the least memory that a model takes, which host of how many this is, where node 0 listens, and the
secret that all nodes share. Without torch, whose import takes seconds: what torch and the kernels tell is `DeviceFacts`, made where they are loaded.
Runs in the main process.
"""

import ctypes
import dataclasses
import functools
import importlib.util
import ipaddress
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.families import native_types
from headrace.checkpoint.model_config import ModelConfig
from headrace.config.server_args import ServerArgs
from headrace.config.web import address_of
from headrace.errors import ConfigError

MEM_FRACTION = {"cpu": 0.5, "cuda": 0.85}
"""--mem-fraction-static by device. A GPU is not shared, but activations and graphs need some memory."""
_DEFAULT_RUNNING = 64
"""--max-running-requests of a model that generates."""

ENGINE_FILES = 64
REPLICA_FILES = 16
"""Pipes and sockets of each additional replica."""
CONNECTION_FILES = 192
"""Needed by a server besides its engine: connections, and the reserve beside them (`server.connection`)."""

SECRET_VARIABLE = "HEADRACE_DIST_SECRET"
_DEFAULT_PORT = 20000
_MIN_SECRET_BYTES = 16
_MAKE_SECRET = (
    f"make one with `openssl rand -hex 32` and give it to every node, in {SECRET_VARIABLE} or --dist-secret-file"
)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about this machine.

    has_cuda: torch sees a GPU. native_kernels: the native CPU kernels can be loaded; native_reason: why not. num_cpus: processors that this
    process may use. cpu_isa: the instruction set of the native kernels. cuda_bfloat16: the GPU computes in bfloat16. cuda_capability:
    (major, minor).
    """

    has_cuda: bool
    native_kernels: bool
    native_reason: str
    num_cpus: int
    cpu_isa: str = ""
    cuda_bfloat16: bool = False
    cuda_capability: tuple[int, int] = (0, 0)


@functools.cache
def cuda_is_there() -> bool | None:
    """False: surely not, since torch was built without CUDA or there is no driver. None: torch will tell."""
    from importlib import metadata  # which few processes need, and which takes 10 ms

    try:
        build = metadata.version("torch").partition("+")[2]
    except metadata.PackageNotFoundError:
        return None
    if build == "cpu":
        return False
    if build.startswith("rocm"):
        return None  # its GPUs have another driver
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return None


def host_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_open_files(args: ServerArgs, with_server: bool = False) -> None:
    """Raises ConfigError if the limit of open files is too low: a start would fail somewhere in the middle, in words of some library."""
    needed = ENGINE_FILES + REPLICA_FILES * (args.num_replicas - 1) + (CONNECTION_FILES if with_server else 0)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        what = "a server" if with_server else "an engine"
        raise ConfigError(
            f"this process may have {allowed} files open and {what} needs {needed}: raise the limit with ulimit -n {needed}"
        )


def least_weight_bytes(model: ModelConfig, itemsize: float) -> int:
    """A lower bound of the bytes of the weights. itemsize: bytes of a weight of a linear layer.

    0 for families that Headrace does not implement itself: their matrices may have other shapes.
    """
    if model.model_type not in native_types():
        return 0
    attention = 2 * model.hidden_size * (model.num_q_heads + model.num_kv_heads) * model.head_dim
    num_weights = model.hidden_size * model.vocab_size
    for layer in range(model.num_layers):
        num_weights += attention + 3 * model.hidden_size * _intermediate_size(model, layer)
    return int(num_weights * itemsize)


def least_kv_bytes(model: ModelConfig, num_tokens: int) -> int:
    """A lower bound of the bytes of a KV cache: in int8, without the scales."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * num_tokens


def most_running(args: ServerArgs) -> int:
    return args.max_running_requests or _DEFAULT_RUNNING


def check_memory(args: ServerArgs, model: ModelConfig, weight_bytes: int, memory_bytes: int) -> None:
    """Refuse a KV cache that surely does not fit into the machine. weight_bytes: at least. Raises ConfigError that names the option."""
    if args.max_total_tokens is not None:
        least_bytes = least_kv_bytes(model, args.max_total_tokens)
        if least_bytes > memory_bytes:
            raise ConfigError(
                f"--max-total-tokens {args.max_total_tokens} needs at least {_gib(least_bytes)}, and the machine has {_gib(memory_bytes)}"
            )
        return
    fraction = (args.mem_fraction_static or MEM_FRACTION["cpu"]) / args.num_replicas
    # Weights that are mapped from a file count as free memory when the worker measures it.
    room = (memory_bytes + weight_bytes) * fraction - weight_bytes - 4 * most_running(args) * model.vocab_size
    num_tokens = args.context_length or 1
    if room < least_kv_bytes(model, num_tokens):
        fitting = max(0, int(room)) // least_kv_bytes(model, 1)
        raise ConfigError(
            f"--mem-fraction-static {fraction:g}: of {_gib(memory_bytes)} of memory, that has room for {fitting} KV tokens at most beside "
            f"{_gib(weight_bytes)} of weights or more, but a sequence may have {args.context_length or model.max_position_embeddings} tokens; "
            f"raise --mem-fraction-static, or {'lower --context-length' if fitting else 'use a smaller model or --quantization'}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def _intermediate_size(model: ModelConfig, layer: int) -> int:
    """Of all experts together."""
    if model.moe is not None and model.moe.is_sparse(layer):
        return model.moe.num_experts * model.moe.intermediate_size
    return model.intermediate_size


def with_nodes(args: ServerArgs, environ: Mapping[str, str]) -> ServerArgs:
    """The options with --nnodes, --node-rank and --dist-init-addr set; what is not given comes from LeaderWorkerSet's variables.

    https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/. Raises ConfigError when they do not fit.
    """
    nnodes = args.nnodes or _number(environ, "LWS_GROUP_SIZE") or 1
    if nnodes == 1:
        if args.node_rank:
            raise ConfigError(f"--node-rank {args.node_rank} is for several nodes: give --nnodes, too")
        if args.dist_init_addr is not None and args.nnodes is None:
            raise ConfigError("--dist-init-addr is for several nodes: give --nnodes, too")
        return dataclasses.replace(args, nnodes=1, node_rank=0)
    rank = args.node_rank if args.node_rank is not None else _number(environ, "LWS_WORKER_INDEX")
    if rank is None:
        raise ConfigError("--nnodes above 1 needs --node-rank, 0 for the node that serves")
    address = args.dist_init_addr or environ.get("LWS_LEADER_ADDRESS")
    if not address:
        raise ConfigError("--nnodes above 1 needs --dist-init-addr HOST:PORT, where node 0 listens for the others")
    host, port = host_and_port(address)
    joined = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    full = dataclasses.replace(args, nnodes=nnodes, node_rank=rank, dist_init_addr=joined)
    _check_nodes(full)
    return full


def _check_nodes(args: ServerArgs) -> None:
    nnodes, rank = args.num_nodes, args.node_rank
    assert rank is not None
    if rank >= nnodes:
        raise ConfigError(f"--node-rank {rank} of --nnodes {nnodes}: nodes are numbered from 0")
    if args.pp_size == 1 and args.tp_size % nnodes:
        raise ConfigError(
            f"--tp-size {args.tp_size} counts the ranks of all nodes: it must be a multiple of --nnodes {nnodes}"
        )
    if args.pp_size > 1 and args.pp_size % nnodes:
        raise ConfigError(
            f"--pp-size {args.pp_size} counts the stages of all nodes: it must be a multiple of --nnodes {nnodes}, since a stage with its "
            f"--tp-size ranks is on one node; to split layers over nodes, use --tp-size without --pp-size"
        )
    if args.enable_dp_attention:
        raise ConfigError("--enable-dp-attention cannot be combined with --nnodes yet: use --tp-size and --ep-size")
    if args.enable_two_batch_overlap and args.pp_size == 1:
        raise ConfigError(
            "--enable-two-batch-overlap needs ranks that sum in the memory of one host: with --nnodes, use it with --pp-size"
        )
    if args.num_replicas > 1:
        raise ConfigError(
            "--dp-size cannot be combined with --nnodes: start several groups of nodes, with a router in front"
        )
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError("--nnodes above 1 needs pyzmq: pip install 'headrace[nodes]'")


def host_and_port(text: str) -> tuple[str, int]:
    """HOST:PORT, [IPV6]:PORT, or one without a port. Raises ConfigError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or isinstance(address_of(text.strip()), ipaddress.IPv6Address):
        host, port = text.strip(), str(_DEFAULT_PORT)
    host = host.removeprefix("tcp://").strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--dist-init-addr must be HOST:PORT of node 0, got {text!r:.80}")
    return host, int(port)


def dist_secret(args: ServerArgs, environ: Mapping[str, str]) -> bytes:
    """What proves that a process belongs to the group, or a server to those that exchange KV. Raises ConfigError if there is none, or a short one."""
    if args.dist_secret_file is None:
        source, secret = SECRET_VARIABLE, environ.get(SECRET_VARIABLE, "").encode()
    else:
        source = f"--dist-secret-file {args.dist_secret_file}"
        try:
            secret = Path(args.dist_secret_file).read_bytes()
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}") from None
    secret = secret.strip()
    if not secret:
        option = "--nnodes above 1" if args.num_nodes > 1 else "--disaggregation-mode"
        raise ConfigError(f"{option} needs a secret: {_MAKE_SECRET}")
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"{source}: the secret has {len(secret)} bytes, fewer than {_MIN_SECRET_BYTES}; {_MAKE_SECRET}"
        )
    return secret


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name} must be a number, got {text!r:.40}")
    return int(text)
