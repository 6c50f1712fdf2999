"""What a figure was measured on: processor, memory, instruction sets, and the commit of the code.

Also what `headrace doctor` prints. Linux; on other systems the unknown parts are None or empty. No torch.
"""

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace import cgroup
from headrace.processes.numa import SYSFS, listed, read_nodes

# As /proc/cpuinfo spells them, in the order in which a kernel prefers them last to first.
_X86_FLAGS = ("sse4_2", "avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
ISA_FLAGS = (*_X86_FLAGS, "asimd", "asimddp", "i8mm", "sve")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, or the part of it that a container may use.

    cpu: its name, on x86 with family and model. num_cores: this process may run on.
    cpu_quota: cores' worth of time the container may use, None = all.
    memory_gib: of the container when it is limited, else of the machine.
    """

    cpu: str
    num_cores: int
    cpu_quota: float | None
    memory_gib: float
    isa: tuple[str, ...]
    system: str
    python: str


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Cores and memory that are near each other. cores: as the system lists them, such as "0-15,32-47"."""

    number: int
    cores: str
    memory_gib: float


@dataclass(frozen=True, slots=True)
class Revision:
    """The commit of the source tree that runs; None when it is not a git checkout."""

    commit: str | None
    dirty: bool | None


def this_machine() -> Machine:
    model, flags = cpuinfo(Path("/proc/cpuinfo"))
    return Machine(
        cpu=model,
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_quota=cgroup.quota_cpus(),
        memory_gib=round(min(psutil.virtual_memory().total, cgroup.memory_limit()) / _GIB, 1),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def numa_nodes(folder: Path = SYSFS) -> tuple[NumaNode, ...]:
    """The NUMA nodes with memory; empty where the system does not tell."""
    return tuple(
        NumaNode(node.number, listed(node.cores), round(node.memory_bytes / _GIB, 1)) for node in read_nodes(folder)
    )


def revision(source: Path = Path(__file__)) -> Revision:
    """Commit of the checkout that holds `source`, and whether tracked files differ from it."""
    commit = _git(source.parent, "rev-parse", "HEAD")
    if commit is None:
        return Revision(None, None)
    return Revision(commit, bool(_git(source.parent, "status", "--porcelain", "--untracked-files=no")))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cpuinfo(path: Path) -> tuple[str, frozenset[str]]:
    """Name and flags of the first core of /proc/cpuinfo. Family and model tell generations apart, which a name in a guest often does not."""
    pairs = (line.partition(":") for line in _text(path).partition("\n\n")[0].splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name = f"{name} (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return name, frozenset(fields.get("flags", fields.get("Features", "")).split())


def _text(path: Path) -> str:
    """Of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
