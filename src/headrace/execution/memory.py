"""Memory available for the KV cache, on CPU and on a GPU. Runs once, in the thread that builds the worker."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import torch

from headrace import cgroup
from headrace.errors import ConfigError


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: on CPU the minimum of what the machine and the control groups allow."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # return what loading left in the allocator
        return int(torch.cuda.mem_get_info(device)[0])
    return min(available_on_host(Path("/proc/meminfo")), cgroup.available_memory())


def available_on_host(meminfo: Path) -> int:
    """MemAvailable of /proc/meminfo, in bytes."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no MemAvailable")


@contextlib.contextmanager
def naming_memory(what: str, remedy: str) -> Iterator[None]:
    """Raises ConfigError instead of the errors of the system and of torch when memory runs out. what: it was for; remedy: what to change."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, OSError, RuntimeError) as error:
        is_ours = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
            error.errno == errno.ENOMEM if isinstance(error, OSError) else "can't allocate memory" in str(error)
        )
        if not is_ours:
            raise
        raise ConfigError(f"out of memory while allocating {what}: {remedy}") from error


def check_pool_fits(num_tokens: int, bytes_per_token: int, available: int) -> None:
    """Refuse a --max-total-tokens that needs more than the bytes that are available. Raises ConfigError."""
    needed = num_tokens * bytes_per_token
    if needed > available:
        raise ConfigError(
            f"--max-total-tokens {num_tokens} needs {needed / 2**30:.1f} GiB at {bytes_per_token} bytes per token, but "
            f"{available / 2**30:.1f} GiB are free; at most {available // bytes_per_token} tokens fit, without the weights"
        )


def kv_token_budget(
    *,
    available: int,
    weight_bytes: int,
    mem_fraction_static: float,
    bytes_per_token: int,
    page_size: int,
    max_tokens_useful: int,
    reserved_bytes: int = 0,
) -> tuple[int, str]:
    """Tokens that fit in mem_fraction_static of the memory that was free before loading, minus the weights.

    available: bytes free now, with the weights loaded. max_tokens_useful: more could never be used at once. reserved_bytes: for other
    purposes. Returns a multiple of page_size, possibly 0, and the reason for it.
    """
    budget = int((available + weight_bytes) * mem_fraction_static) - weight_bytes - reserved_bytes
    fitting = max(0, budget) // bytes_per_token // page_size * page_size
    useful = -(-max_tokens_useful // page_size) * page_size
    if useful < fitting:
        return useful, f"max_running_requests x context_length (memory has room for {fitting})"
    return (
        fitting,
        f"{mem_fraction_static:.0%} of {(available + weight_bytes) / 2**30:.1f} GiB minus {weight_bytes / 2**30:.2f} GiB of weights"
        f"{f' and {reserved_bytes / 2**30:.2f} GiB that steps need' if reserved_bytes else ''}, "
        f"at {bytes_per_token} bytes per token",
    )
