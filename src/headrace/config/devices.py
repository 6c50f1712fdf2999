"""What is known of the machine without importing torch, which takes seconds. Runs in the main process."""

import ctypes
import functools
import os
from importlib import metadata


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
