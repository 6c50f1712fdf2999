"""How long ranks on one host take to sum their tensors: the shared-memory group, the one over TCP (here over the loopback), and gloo beside them.

    .venv/bin/python -m bench.collectives [--ranks 2] [--bytes 2304 524288] [--rounds 5] [--output FILE]

Each rank is a process with one thread. They sum again and again, so all come at nearly the same time, as they do after equal shares of a layer.
A round measures all, one after the other; the result has the median of all calls of the leader, in microseconds, and the 10th and 90th percentile
of them. Load: the system's one-minute load average before the ranks start. Prints JSON.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from bench.program import parser_of, write_report
from headrace import kernels
from headrace.distributed.base import Group
from headrace.distributed.network import Address, Member
from headrace.distributed.network_follower import FollowerGroup
from headrace.distributed.network_leader import LeaderGroup
from headrace.distributed.one_host import SharedMemoryGroup

dist: Any = torch.distributed
LIMIT_S = 60.0
HOST = "127.0.0.1"
SECRET = b"only for this benchmark"
WARM_UP_CALLS = 50
CALLS = {"shared_memory": 2_000, "network": 300, "gloo": 300}
"""In a round, of small tensors; of large ones a tenth of it."""
LARGE_BYTES = 100_000


def time_calls(all_reduce: Callable[[torch.Tensor], object], num_bytes: int, calls: int) -> list[float]:
    """Microseconds of each call."""
    x = torch.ones(num_bytes // 4)
    times = []
    for call in range(WARM_UP_CALLS + calls):
        x.fill_(1.0)
        begin = time.perf_counter_ns()
        all_reduce(x)
        if call >= WARM_UP_CALLS:
            times.append((time.perf_counter_ns() - begin) / 1e3)
    return times


def run(
    group: SharedMemoryGroup, network: Group, store: Path, sizes: list[int], rounds: int
) -> dict[tuple[str, int], list[float]]:
    """What every rank does."""
    torch.set_num_threads(1)
    kernels.set_num_threads(1)
    timeout = timedelta(seconds=LIMIT_S)
    gloo = dist.ProcessGroupGloo(dist.FileStore(str(store), group.size), group.rank, group.size, timeout=timeout)
    ways = {
        "shared_memory": group.all_reduce,
        "network": network.all_reduce,
        "gloo": lambda x: gloo.allreduce([x]).wait(),
    }
    for name, all_reduce in ways.items():
        x = torch.full((5,), float(group.rank + 1))
        all_reduce(x)
        assert x.tolist() == [group.size * (group.size + 1) / 2] * 5, (name, x)
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for num_bytes in sizes:
            for name, all_reduce in ways.items():
                calls = CALLS[name] // (10 if num_bytes >= LARGE_BYTES else 1)
                found.setdefault((name, num_bytes), []).extend(time_calls(all_reduce, num_bytes, calls))
    return found


def result(name: str, num_bytes: int, times: list[float]) -> dict[str, float | int | str]:
    tenths = statistics.quantiles(times, n=10)
    return {
        "way": name,
        "bytes": num_bytes,
        "calls": len(times),
        "median_us": round(statistics.median(times), 2),
        "p10_us": round(tenths[0], 2),
        "p90_us": round(tenths[-1], 2),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=[2304, 524_288])
    parser.add_argument("--rounds", type=int, default=5)
    # Rank, descriptor, port, file of the store: how a follower is started.
    parser.add_argument("--follow", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.follow is not None:
        rank, fd, port, store = options.follow
        group = SharedMemoryGroup.join(int(fd), int(rank), options.ranks, LIMIT_S)
        member = Member(int(rank), options.ranks, {})
        network = FollowerGroup.join(Address(HOST, int(port)), SECRET, member, LIMIT_S, LIMIT_S)
        run(group, network, Path(store), options.bytes, options.rounds)
        network.close()
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        fd = SharedMemoryGroup.memory(options.ranks)
        group = SharedMemoryGroup.join(fd, 0, options.ranks, LIMIT_S)
        leader = LeaderGroup.listen(Address(HOST, 0), SECRET, Member(0, options.ranks, {}), LIMIT_S)
        store = Path(folder, "store")
        command = [sys.executable, "-m", "bench.collectives", *sys.argv[1:], "--follow"]
        followers = [
            subprocess.Popen([*command, str(rank), str(fd), str(leader.port), str(store)], pass_fds=[fd])
            for rank in range(1, options.ranks)
        ]
        os.close(fd)
        leader.wait_for_ranks(LIMIT_S)
        found = run(group, leader, store, options.bytes, options.rounds)
        for follower in followers:
            assert follower.wait(LIMIT_S) == 0
        leader.close()
    results = [result(name, num_bytes, times) for (name, num_bytes), times in found.items()]
    write_report({"ranks": options.ranks, "threads_per_rank": 1, "load": load, "results": results}, options.output)


if __name__ == "__main__":
    main()
