"""What results say of the machine that they were measured on."""

import pytest

from headrace.benchmark.machine import NumaNode, cpuinfo, numa_nodes

X86 = """processor\t: 0
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC
flags\t\t: fpu avx2 avx512_bf16

processor\t: 1
cpu family\t: 6
model name\t: another
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU part\t: 0xd40\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [(X86, "AMD EPYC (family 26, model 2)", {"fpu", "avx2", "avx512_bf16"}), (ARM, None, {"fp", "asimd", "asimddp"})],
)
def test_a_processor_is_named_so_that_generations_differ(tmp_path, text, name, flags):
    (tmp_path / "cpuinfo").write_text(text)
    got, got_flags = cpuinfo(tmp_path / "cpuinfo")

    assert got_flags == flags
    assert got == name if name else "family" not in got


def test_without_cpuinfo_the_processor_still_has_a_name(tmp_path):
    assert cpuinfo(tmp_path / "missing")[1] == frozenset()


def test_nodes_with_memory_are_listed_with_their_cores(tmp_path):
    for number, cores, kib in ((10, "8-15", 2097152), (2, "0-7,16", 1048576), (3, "", 0)):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(f"{cores}\n")
        (node / "meminfo").write_text(f"Node {number} MemTotal:  {kib} kB\nNode {number} MemFree:  12 kB\n")
    assert numa_nodes(tmp_path) == (NumaNode(2, "0-7,16", 1.0), NumaNode(10, "8-15", 2.0))
    assert numa_nodes(tmp_path / "missing") == ()
