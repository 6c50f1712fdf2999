"""What the control groups (v2 or v1) of this process allow: processor time and memory.

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/. Linux; elsewhere nothing is limited. Called by any thread.
"""

from collections.abc import Iterator
from pathlib import Path

NO_LIMIT = 1 << 60
"""Bytes; cgroup v1 writes a number of this order for "no limit"."""

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def quota_cpus(root: Path = _ROOT, own: Path = _OWN) -> float | None:
    """The tightest quota on the way up from this process's group, in processors; None without one."""
    quotas: list[float] = []
    for folder, is_v2 in _groups("cpu", root, own):
        if is_v2:
            limit, _, period = _read(folder / "cpu.max").partition(" ")
        else:
            limit, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if limit.isdigit() and period.isdigit():
            quotas.append(int(limit) / int(period))
    return min((quota for quota in quotas if quota > 0), default=None)


def memory_limit(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Bytes that the groups allow in all; at least NO_LIMIT without a limit."""
    return min((limit for limit, _, _ in _memory_limits(root, own)), default=NO_LIMIT)


def available_memory(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Bytes that the groups still allow; NO_LIMIT without a limit. Page cache that can be dropped (`inactive_file`) is not usage."""
    rooms = (
        max(0, limit - int(usage) + _droppable(folder))
        for limit, usage, folder in _memory_limits(root, own)
        if usage.isdigit()
    )
    return min(rooms, default=NO_LIMIT)


def _memory_limits(root: Path, own: Path) -> Iterator[tuple[int, str, Path]]:
    """Every limit on the way up, what is used of it (as it is written), and its group's folder."""
    for folder, is_v2 in _groups("memory", root, own):
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, usage = (_read(folder / name) for name in names)
        if limit.isdigit() and int(limit) < NO_LIMIT:
            yield int(limit), usage, folder


def _groups(controller: str, root: Path, own: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's groups that may limit `controller`, from the inside out, each with whether it is of v2."""
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        is_v2 = controllers == ""
        if is_v2 or controller in controllers.split(","):
            parts = [part for part in path.split("/") if part and part != ".."]
            base = root if is_v2 else root / controller
            for n in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:n]), is_v2


def _droppable(folder: Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    """The file's text; "" if it does not exist or cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
