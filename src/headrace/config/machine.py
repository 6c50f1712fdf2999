"""Checks of the machine before anything is loaded: its devices, its memory, the limit of open files, and the least memory that a model takes.

Without torch, whose import takes seconds. Runs in the main process.
"""

import ctypes
import functools
import os
import resource
from importlib import metadata

from headrace.checkpoint.families import native_types
from headrace.checkpoint.model_config import ModelConfig
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError

ENGINE_FILES = 64
REPLICA_FILES = 16
"""Pipes and sockets of each additional replica."""
CONNECTION_FILES = 192
"""Needed by a server besides its engine: connections, and the reserve beside them (`server.connection`)."""


@functools.cache
def cuda_is_there() -> bool | None:
    """False: surely not, since torch was built without CUDA or there is no driver. None: torch will tell."""
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
    """Memory of the machine, in use or not."""
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


def _intermediate_size(model: ModelConfig, layer: int) -> int:
    """Of all experts together."""
    if model.moe is not None and model.moe.is_sparse(layer):
        return model.moe.num_experts * model.moe.intermediate_size
    return model.intermediate_size
