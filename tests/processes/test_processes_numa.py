"""Which NUMA node each rank gets, on machines that are made up, and what binding does to a process of this one."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from memory_policy import bound_memory

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.processes import numa, share
from headrace.processes.numa import Binding, Node, bindings, dealt, listed, read_nodes
from headrace.processes.rank_groups import starts_here

GIB = 1 << 30
ANY = ServerArgs(model_path="any", device="cpu", numa_bind=True)


def machine(folder: Path, **nodes: tuple[str, int]) -> Path:
    """A tree as in /sys of nodes, each with its list of cores and its GiB, of which a quarter is free and a quarter page cache."""
    for name, (cores, gib) in nodes.items():
        place = folder / name
        place.mkdir()
        (place / "cpulist").write_text(f"{cores}\n")
        kib, number = gib << 20, name.removeprefix("node")
        lines = {
            "MemTotal": kib,
            "MemFree": kib // 4,
            "MemUsed": kib * 3 // 4,
            "Active": kib // 2,
            "Active(file)": kib // 8,
            "Inactive(file)": kib // 8,
        }
        (place / "meminfo").write_text("".join(f"Node {number} {key}:  {value} kB\n" for key, value in lines.items()))
    (folder / "possible").write_text("0-63\n")
    return folder


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Those that this process may use; all of the machines here at first."""
    allowed = set(range(64))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    return allowed


@pytest.fixture
def status(tmp_path: Path) -> Path:
    """As /proc/self/status of a process whose control group allows the memory of all nodes."""
    file = tmp_path / "status"
    file.write_text("Name:\tpython\nMems_allowed:\tffff\nMems_allowed_list:\t0-63\n")
    return file


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """Four nodes with holes in their numbers, one that is only memory (CXL), and one that has none."""
    folder = tmp_path / "node"
    folder.mkdir()
    return machine(
        folder,
        node0=("0-3,16-19", 8),
        node2=("4-7", 8),
        node3=("", 64),
        node5=("8-11", 8),
        node6=("20", 0),
        node11=("12-15", 4),
    )


def placed(args: ServerArgs, folder: Path, status: Path, replica: int = 0) -> list[tuple[int, str, int]]:
    """Node, cores and number of ranks of each rank."""
    found = bindings(args, replica, folder, status)
    return [(one.node, listed(one.cores), one.num_ranks) for one in found]


def test_nodes_with_memory_are_read_in_the_order_of_their_numbers(four: Path):
    nodes = read_nodes(four)
    assert [node.number for node in nodes] == [0, 2, 3, 5, 11]
    assert nodes[0] == Node(0, (0, 1, 2, 3, 16, 17, 18, 19), 8 * GIB, 4 * GIB)
    assert nodes[2].cores == ()


@pytest.mark.parametrize(
    ("num_ranks", "places"),
    [(1, "0"), (2, "01"), (3, "012"), (4, "0123"), (5, "00123"), (6, "001223"), (8, "00112233"), (9, "000112233")],
)
def test_ranks_get_nodes_in_order_and_neighbours_share_one(num_ranks: int, places: str):
    nodes = [Node(number, (number,), GIB, GIB) for number in range(4)]
    found = dealt(nodes, num_ranks)
    assert "".join(str(one.node) for one in found) == places
    assert [one.num_ranks for one in found] == [places.count(place) for place in places]


def test_a_rank_gets_a_node_with_cores_and_memory(four: Path, cores: set[int], status: Path):
    args = dataclasses.replace(ANY, tp_size=4)
    assert placed(args, four, status) == [(0, "0-3,16-19", 1), (2, "4-7", 1), (5, "8-11", 1), (11, "12-15", 1)]
    assert placed(ANY, four, status) == [(0, "0-3,16-19", 1)]
    assert placed(dataclasses.replace(args, numa_bind=False), four, status) == []


def test_a_rank_gets_what_its_control_group_and_affinity_allow(four: Path, cores: set[int], status: Path):
    args = dataclasses.replace(ANY, tp_size=2)
    cores -= {0, 4, 5, 6, 7}
    assert placed(args, four, status) == [(0, "1-3,16-19", 1), (5, "8-11", 1)]

    status.write_text("Mems_allowed_list:\t1-4,11\n")
    assert placed(args, four, status) == [(11, "12-15", 2), (11, "12-15", 2)]

    status.write_text("Mems_allowed_list:\t3\n")
    with pytest.raises(ConfigError, match="no NUMA node with memory and cores that this process may use"):
        bindings(args, 0, four, status)


def test_replicas_and_stages_share_the_nodes(four: Path, cores: set[int], status: Path):
    args = dataclasses.replace(ANY, dp_size=2, tp_size=2)
    assert [[place[0] for place in placed(args, four, status, replica)] for replica in range(2)] == [[0, 2], [5, 11]]
    args = dataclasses.replace(args, pp_size=2)
    assert [[place[0] for place in placed(args, four, status, replica)] for replica in range(2)] == [
        [0, 0, 2, 2],
        [5, 5, 11, 11],
    ]


def test_each_host_has_nodes_of_its_own(four: Path, cores: set[int], status: Path):
    args = dataclasses.replace(ANY, tp_size=4, nnodes=2, node_rank=1, dist_init_addr="host:1")
    assert [place[0] for place in placed(args, four, status)] == [0, 2]
    starts = starts_here(args, bindings(args, 0, four, status))
    assert [(start.rank, start.binding and start.binding.node) for start in starts] == [(2, 0), (3, 2)]


def test_a_machine_that_names_no_nodes_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--numa-bind: .* names no NUMA node"):
        bindings(ANY, 0, tmp_path)


@pytest.fixture
def shared(four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of `four`, whose nodes have 14 GiB available, and the system 20."""
    monkeypatch.setattr(share, "read_nodes", lambda: read_nodes(four))
    monkeypatch.setattr("headrace.execution.memory.available_bytes", lambda device: 20 * GIB)
    monkeypatch.setattr("headrace.cgroup.quota_cpus", lambda: None)


def test_a_rank_has_a_share_of_the_cores_and_the_memory_of_its_node(shared: None):
    two, alone = Binding(0, tuple(range(8)), 2), Binding(11, (12, 13, 14, 15), 1)
    args = dataclasses.replace(ANY, tp_size=3, mem_fraction_static=0.5)

    first = share.share_of_machine(args, [two, two, alone])
    assert (first.num_threads, first.mem_fraction_static) == (4, 0.5 * 2 / 20)
    last = share.share_of_machine(args, [alone])
    assert (last.num_threads, last.mem_fraction_static) == (4, 0.5 * 2 / 20)
    given = share.share_of_machine(dataclasses.replace(args, num_threads=6), [two])
    assert given.num_threads == 2


def test_a_rank_has_no_more_than_its_share_of_what_a_container_allows(shared: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.execution.memory.available_bytes", lambda device: 4 * GIB)
    monkeypatch.setattr("headrace.cgroup.quota_cpus", lambda: 5.5)
    args = dataclasses.replace(ANY, tp_size=2, mem_fraction_static=0.5)

    found = share.share_of_machine(args, [Binding(0, tuple(range(8)), 1), Binding(2, (4, 5, 6, 7), 1)])
    assert (found.num_threads, found.mem_fraction_static) == (3, 0.25)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"single_process": True}, "--numa-bind .* cannot be combined with --single-process"),
        ({"device": "cuda"}, "--numa-bind .* cannot be combined with --device cuda"),
    ],
)
def test_what_cannot_be_bound_is_refused(changes: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(ANY, **changes)  # type: ignore[arg-type]


def test_a_model_that_would_run_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="this model would run on a GPU: add --device cpu"):
        share.share_of_machine(dataclasses.replace(ANY, device="auto"), [Binding(0, (0,), 1)])


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.EPERM, r"a container needs the capability SYS_NICE .*, or leave"), (errno.ENOSYS, "leave the option out")],
)
def test_a_kernel_that_refuses_is_named_with_what_to_do(code: int, remedy: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(node: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(numa, "_bind_memory", refuse)
    with pytest.raises(ConfigError, match=f"does not bind this process to NUMA node 3 .{os.strerror(code)}.: {remedy}"):
        numa.bind(Binding(3, (0,), 1))


_IN_A_CHILD = """
import json, os, threading
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.processes import numa, share
from memory_policy import bound_memory

before = bound_memory()
[place] = numa.bindings(ServerArgs(model_path="any", numa_bind=True))
place = numa.Binding(place.node, place.cores[:1], 1)
numa.bind(place)
found = []
thread = threading.Thread(target=lambda: found.extend([sorted(os.sched_getaffinity(0)), bound_memory()]))
thread.start()
thread.join()
try:
    numa.bind(numa.Binding(1023, place.cores, 1))
    refused = ""
except ConfigError as error:
    refused = error.message
print(json.dumps([before, place.node, place.cores, found, refused]))
"""


def skip_where_memory_cannot_be_bound() -> None:
    """The kernel allows it, or it does not to look, either."""
    try:
        bound_memory()
    except (KeyError, OSError) as error:
        pytest.skip(f"the kernel does not bind memory: {error}")
    if not read_nodes():
        pytest.skip("the system names no NUMA nodes")


def test_a_bound_process_and_its_threads_have_the_cores_and_the_memory_of_the_node():
    skip_where_memory_cannot_be_bound()
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_CHILD],
        cwd=Path(__file__).parent,  # of memory_policy
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    before, node, cores, found, refused = json.loads(done.stdout)
    assert before == []
    assert found == [cores, [node]]
    assert "does not bind this process to NUMA node 1023" in refused
