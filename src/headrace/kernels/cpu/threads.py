"""The default number of threads of the kernels. Only reads facts of the machine; runs once, when the kernels are loaded."""

import math
import os
from pathlib import Path


def default_num_threads(
    cgroup_root: Path = Path("/sys/fs/cgroup"), own_cgroup: Path = Path("/proc/self/cgroup")
) -> int:
    """Processors that this process may use: its affinity mask, limited by the CPU quota of its control group (v2 or v1), at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = quota_cpus(cgroup_root, own_cgroup)
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def quota_cpus(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """The tightest quota on the way up from this process's group, in processors; None without one."""
    quotas: list[float] = []
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _upwards(root, path):
                limit, _, period = _read(folder / "cpu.max").strip().partition(" ")
                if limit.isdigit() and period.isdigit():
                    quotas.append(int(limit) / int(period))
        elif "cpu" in controllers.split(","):
            for folder in _upwards(root / "cpu", path):
                limit, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
                if limit.isdigit() and period.isdigit():
                    quotas.append(int(limit) / int(period))
    return min((quota for quota in quotas if quota > 0), default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """root/a/b, root/a, root for the path /a/b."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [root.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _read(path: Path) -> str:
    """The file's text; "" when there is no such file or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
