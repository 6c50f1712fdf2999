"""NUMA nodes of this machine, which of them each rank gets, and binding a process to one (--numa-bind).

A bound process runs on the cores of a node and gets memory from it alone, as with `numactl --cpunodebind --membind`. Both are properties of a
thread, which threads and processes that it starts later inherit; so a process binds itself before it starts any that compute, and before
its memory is filled. Linux, by its system calls (set_mempolicy(2), sched_setaffinity(2)). No torch.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.log import get_logger

logger = get_logger(__name__)

SYSFS = Path("/sys/devices/system/node")
"""Format: Documentation/ABI/stable/sysfs-devices-node of Linux."""
_SELF = Path("/proc/self/status")
_BIND = 2
_MAX_NODES = 1024
"""As many as Linux can be built for."""
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call by architecture; the C library has no function for it."""
_AVAILABLE = ("MemFree", "Active(file)", "Inactive(file)")


@dataclass(frozen=True, slots=True)
class Node:
    """Cores and memory that are near each other. available_bytes: free, or page cache that can be dropped."""

    number: int
    cores: tuple[int, ...]
    memory_bytes: int
    available_bytes: int


class Binding(msgspec.Struct, frozen=True):
    """Where a rank runs. node: its number. cores: those of it that may be used. num_ranks: how many ranks of this engine share them."""

    node: int
    cores: tuple[int, ...]
    num_ranks: int


def read_nodes(folder: Path = SYSFS) -> tuple[Node, ...]:
    """The nodes with memory, by number; empty where the system does not tell."""
    found = []
    for place in folder.glob("node[0-9]*"):
        kib = dict(_meminfo(place / "meminfo"))
        if kib.get("MemTotal"):
            available = sum(kib.get(name, 0) for name in _AVAILABLE)
            cores = tuple(_numbers(_read(place / "cpulist")))
            found.append(Node(int(place.name.removeprefix("node")), cores, kib["MemTotal"] << 10, available << 10))
    return tuple(sorted(found, key=lambda node: node.number))


def listed(cores: Sequence[int]) -> str:
    """Ascending numbers as the system lists them, such as "0-7,16"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def usable(nodes: Iterable[Node], allowed_cores: Collection[int], allowed_nodes: Collection[int] | None) -> list[Node]:
    """The nodes that a rank can be bound to, each with those of its cores that are allowed: with such a core, and memory that is allowed.

    allowed_nodes: None = all.
    """
    found = []
    for node in nodes:
        cores = tuple(core for core in node.cores if core in allowed_cores)
        if cores and (allowed_nodes is None or node.number in allowed_nodes):
            found.append(replace(node, cores=cores))
    return found


def dealt(nodes: Sequence[Node], num_ranks: int) -> list[Binding]:
    """A node for each rank: one after the other or, with more ranks than nodes, as many neighbours to each as even shares allow."""
    places = [rank if num_ranks <= len(nodes) else rank * len(nodes) // num_ranks for rank in range(num_ranks)]
    return [Binding(nodes[place].number, nodes[place].cores, places.count(place)) for place in places]


def bindings(args: ServerArgs, replica: int = 0, folder: Path = SYSFS, status: Path = _SELF) -> list[Binding]:
    """Of each rank of a replica on this host; empty without --numa-bind. Called before this process is bound, since it reads what it may use.

    Raises ConfigError if there is no node to bind to.
    """
    if not args.numa_bind:
        return []
    each = args.num_ranks // args.num_nodes
    nodes = usable(read_nodes(folder), os.sched_getaffinity(0), _allowed_nodes(status))
    if not nodes:
        raise ConfigError(
            f"--numa-bind: {folder} names no NUMA node with memory and cores that this process may use; leave the option out"
        )
    return dealt(nodes, args.num_replicas * each)[replica * each : (replica + 1) * each]


def bind(binding: Binding) -> None:
    """Bind this thread, and those that it starts from now on. Raises ConfigError when the kernel refuses."""
    try:
        os.sched_setaffinity(0, binding.cores)
        _bind_memory(binding.node)
    except OSError as error:
        remedy = "leave the option out"
        if error.errno == errno.EPERM:
            remedy = f"a container needs the capability SYS_NICE for it (docker run --cap-add SYS_NICE), or {remedy}"
        raise ConfigError(
            f"--numa-bind: the kernel does not bind this process to NUMA node {binding.node} ({error.strerror}): {remedy}"
        ) from None
    logger.info("bound to NUMA node %d: its cores %s, and its memory", binding.node, listed(binding.cores))


def _bind_memory(node: int) -> None:
    """Raises OSError when the kernel refuses."""
    machine = platform.machine()
    if machine not in _SET_MEMPOLICY:
        raise ConfigError(
            f"--numa-bind works on {' and '.join(_SET_MEMPOLICY)}, not on {machine}; leave the option out"
        )
    mask = (ctypes.c_ulong * (_MAX_NODES // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << (node % _WORD_BITS)
    # The kernel takes one bit less than it is told.
    arguments = ctypes.c_int(_BIND), mask, ctypes.c_ulong(len(mask) * _WORD_BITS + 1)
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(_SET_MEMPOLICY[machine]), *arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _allowed_nodes(status: Path) -> frozenset[int] | None:
    """Those whose memory the control group (cpuset) of this process allows; None = all."""
    for line in _read(status).splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return frozenset(_numbers(value))
    return None


def _meminfo(file: Path) -> Iterator[tuple[str, int]]:
    """Names and KiB of lines such as "Node 0 MemTotal:  24657364 kB"."""
    for line in _read(file).splitlines():
        words = line.split()
        if len(words) >= 4 and words[3].isdecimal():
            yield words[2].removesuffix(":"), int(words[3])


def _numbers(text: str) -> Iterator[int]:
    """Those of a list such as "0-7,16"."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            yield from range(int(first), int(last or first) + 1)


def _read(file: Path) -> str:
    """The file's text; "" if it does not exist or cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
