"""Which implementation runs, and why: loading, instruction sets, threads, the fallback."""

import ast
import os
import platform
import shutil
import subprocess
import sys
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from headrace import cgroup, kernels
from headrace.errors import ConfigError
from headrace.kernels import cpu, registry
from headrace.kernels.cpu import default_num_threads

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def least_isa(native):
    return [isa for isa, reason in cpu.isas() if not reason][-1]


@pytest.fixture
def fresh(monkeypatch):
    """As in a new process: nothing loaded, nothing chosen."""
    monkeypatch.setattr(cpu, "_loaded", None)
    monkeypatch.setattr(cpu, "_reason", "")
    monkeypatch.setattr(registry, "_chosen", {})
    monkeypatch.delenv(cpu.ISA_VARIABLE, raising=False)
    return monkeypatch


def test_the_extension_loads_wherever_it_can_be_built():
    if cpu.load() is None and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler here, and no extension")
    assert cpu.why_not() == ""


def test_the_extension_is_what_its_types_say(native: None):
    loaded = cpu.load()
    found = {
        (owner.__name__.rpartition(".")[2], name): signature(ast.parse(f"{value.__nb_signature__[0][0]}: ...").body[0])
        for owner in (loaded, *(each for each in vars(loaded).values() if isinstance(each, type)))
        for name, value in vars(owner).items()
        if hasattr(value, "__nb_signature__")
    }
    types = ast.parse((ROOT / "src/headrace/kernels/cpu/_native.pyi").read_text())
    said = {
        (name, each.name): signature(each)
        for name, body in [
            ("_native", types.body),
            *((c.name, c.body) for c in types.body if isinstance(c, ast.ClassDef)),
        ]
        for each in body
        if isinstance(each, ast.FunctionDef)
    }
    assert found == said


def signature(function: ast.FunctionDef) -> list[str]:
    """The types that a function takes, and what it returns."""
    given = [*function.args.posonlyargs, *function.args.args]
    types = [ast.unparse(each.annotation) for each in given if each.annotation] + [ast.unparse(function.returns)]
    return [each.replace("collections.abc.Sequence", "list").removeprefix("builtins.") for each in types]


def test_without_the_extension_torch_runs_every_op_and_the_report_says_why(fresh):
    fresh.setitem(sys.modules, "headrace.kernels.cpu._native", None)

    assert cpu.load() is None
    assert "does not load" in cpu.why_not()
    assert {(r.op, r.implementation) for r in kernels.report()} == {(op, "torch") for op in registry.OPS}
    of_native = [r for r in kernels.report() if r.op in registry.IMPLEMENTATIONS[0].functions]
    assert all("native: the native extension does not load" in r.reason for r in of_native)
    packed = kernels.pack_linear(torch.eye(4))
    assert packed.layout == "torch"
    assert torch.equal(kernels.linear(torch.ones(2, 4), packed), torch.ones(2, 4))
    with pytest.raises(ConfigError, match="does not load"):
        cpu.select_isa("baseline")


def test_kernels_of_another_processor_leave_every_op_to_torch(fresh):
    class Foreign:
        def isa(self):
            raise RuntimeError("this processor lacks avx512f, which 'avx512' needs")

    fresh.setitem(sys.modules, "headrace.kernels.cpu._native", Foreign())

    assert cpu.load() is None
    assert cpu.why_not() == (
        "the native kernels are for another processor (this processor lacks avx512f, which 'avx512' needs); "
        "scripts/setup compiles them for this one"
    )
    assert {(r.op, r.implementation) for r in kernels.report()} == {(op, "torch") for op in registry.OPS}


DISPATCH = """
#include <cstdio>
#include <exception>
#include "dispatch.h"
namespace headrace::baseline {
const KernelTable& table() {
  static const KernelTable kTable = [] {
    KernelTable table{};
    table.isa = "baseline";
    return table;
  }();
  return kTable;
}
}
using namespace headrace;
int main() {
  for (const std::string& isa : known_isas()) std::printf("%s: %s\\n", isa.c_str(), why_not_isa(isa).c_str());
  std::printf("%s\\n", kernels().isa);
  try {
    select_isa("avx2");
  } catch (const std::exception& error) {
    std::printf("%s\\n", error.what());
  }
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64")
def test_a_build_of_one_instruction_set_runs_it_and_knows_the_others(tmp_path):
    names = ("avx512bf16", "amx", "avx512vnni", "avx512", "avxvnni", "avx2", "baseline")
    has = [f"-DHEADRACE_HAS_{name}={int(name == 'baseline')}" for name in names]
    (tmp_path / "main.cpp").write_text(DISPATCH)
    sources = [f"-I{ROOT / 'csrc/cpu'}", ROOT / "csrc/cpu/dispatch.cpp", tmp_path / "main.cpp"]
    subprocess.run(["g++", "-std=c++17", "-O0", *has, *sources, "-o", tmp_path / "main"], check=True)

    said = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout.splitlines()

    assert said == [
        *(f"{name}: not in this build" for name in names[:-1]),
        "baseline: ",
        "baseline",
        "not in this build, but in that of scripts/setup --all-isas",
    ]


@pytest.mark.parametrize(
    ("isas", "said"), [("avx1024", "unknown instruction set avx1024"), ("amx", "amx needs avx512bf16")]
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64")
def test_a_build_for_instruction_sets_that_cannot_be_is_refused(tmp_path, isas, said):
    cmake = shutil.which("cmake", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}")
    if cmake is None:
        pytest.skip("no cmake here")
    command = [cmake, "-S", ROOT, "-B", tmp_path, "-DHEADRACE_KERNEL_TESTS=ON", f"-DHEADRACE_ISAS={isas}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert said in done.stderr


def test_the_report_names_the_instruction_set(native):
    assert [r.op for r in kernels.report()] == list(registry.OPS)
    best = next(isa for isa, reason in cpu.isas() if not reason)
    assert {
        (r.implementation, r.reason) for r in kernels.report() if r.op in registry.IMPLEMENTATIONS[0].functions
    } == {(f"native ({best})", "")}
    assert [r.op for r in kernels.report() if r.implementation == "torch"] == ["route"]


def test_the_variable_selects_an_instruction_set(least_isa, fresh):
    fresh.setenv(cpu.ISA_VARIABLE, least_isa)
    module = cpu.load()
    assert module is not None
    assert module.isa() == least_isa


def test_an_unknown_instruction_set_is_refused(native, fresh):
    fresh.setenv(cpu.ISA_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match=r"HEADRACE_CPU_ISA=avx1024: unknown instruction set.*this build has"):
        cpu.load()
    fresh.delenv(cpu.ISA_VARIABLE)
    with pytest.raises(ConfigError, match="unknown instruction set"):
        cpu.select_isa("avx1024")


def test_preferring_torch_ends_with_the_block(native):
    with kernels.prefer("torch"):
        assert {r.implementation for r in kernels.report()} == {"torch"}
        assert "torch is preferred" in kernels.report()[0].reason
        packed = kernels.pack_linear(torch.randn(8, 8))
    assert packed.layout == "torch"
    assert kernels.pack_linear(torch.randn(8, 8)).layout == "native_f32"
    assert kernels.linear(torch.randn(2, 8), packed).shape == (2, 8)
    with pytest.raises(ValueError, match="no kernel implementation"), kernels.prefer("fortran"):
        pass


def test_a_gpu_gets_triton_and_torch_has_the_rest(native):
    assert registry.select("rms_norm", "cpu").__module__ == "headrace.kernels.cpu.native_ops"
    for op in registry.OPS:
        provider = registry.select(op, "meta").__module__
        # The draw is a module of its own.
        assert provider in ("headrace.kernels.torch_fallback", "headrace.kernels.drawing")
    if find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    of_triton = {row.op for row in kernels.report("cuda") if row.implementation == "triton"}
    assert of_triton == {op for op, module in registry.OPS.items() if module}
    assert all("headrace.kernels.triton." in registry.select(op, "cuda").__module__ for op in of_triton)
    assert registry.select("embedding", "cuda").__module__ == "headrace.kernels.torch_fallback"
    assert registry.for_layout("torch", "linear", "cuda").__module__ == "headrace.kernels.triton.linear"
    assert registry.for_layout("torch", "moe", "cuda").__name__ == "moe"
    assert registry.for_layout("native_f32", "linear", "cpu").__module__ == "headrace.kernels.cpu.native_ops"


def test_batch_invariance_changes_the_products_of_a_gpu_alone(native):
    if find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    with kernels.batch_invariant():
        assert {r.op for r in kernels.report("cuda") if "invariant" in r.implementation} == {"linear", "moe"}
        assert registry.for_layout("torch", "linear", "cuda").__name__ == "invariant_linear"
        assert registry.for_layout("torch", "moe", "cuda").__name__ == "invariant_moe"
        assert registry.for_layout("torch", "linear", "cpu").__module__ == "headrace.kernels.torch_fallback"
        assert registry.select("linear", "cpu").__module__ == "headrace.kernels.cpu.native_ops"
    assert registry.for_layout("torch", "linear", "cuda").__module__ == "headrace.kernels.triton.linear"


def test_every_implementation_has_its_ops():
    for implementation in registry.IMPLEMENTATIONS:
        if not implementation.why_not("cpu"):
            for op in implementation.functions:
                assert callable(registry._function(implementation, op))


def test_threads_are_counted_and_less_than_one_is_refused(native):
    kernels.set_num_threads(3)
    assert kernels.num_threads() == 3
    with pytest.raises(ValueError, match="at least 1"):
        kernels.set_num_threads(0)


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 2),
        ("0::/a\n", {"a/cpu.max": "10000 100000\n"}, 1),
        ("3:cpu,cpuacct:/x\n0::/\n", {"cpu/x/cpu.cfs_quota_us": "100000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 1),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_default_threads_follow_the_quota(tmp_path, monkeypatch, group, files, quota):
    own = tmp_path / "own"
    own.write_text(group)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    allowed = len(os.sched_getaffinity(0))
    want = allowed if quota is None else min(allowed, quota)
    monkeypatch.setattr(cgroup, "quota_cpus", partial(cgroup.quota_cpus, tmp_path / "cgroup", own))
    assert default_num_threads() == want


def test_callers_in_several_threads_get_right_results(native):
    kernels.set_num_threads(2)
    packed = kernels.pack_linear(torch.randn(300, 400).bfloat16())
    inputs = [torch.randn(rows, 400) for rows in (1, 5, 30, 70)]
    wants = [kernels.linear(x, packed) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            if not torch.equal(kernels.linear(inputs[index], packed), wants[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_changing_the_number_of_threads_while_others_compute(native):
    packed = kernels.pack_linear(torch.randn(300, 400).bfloat16())
    x = torch.randn(9, 400)
    want = kernels.linear(x, packed)
    results: list[bool] = []

    def work() -> None:
        results.extend(torch.equal(kernels.linear(x, packed), want) for _ in range(100))

    thread = threading.Thread(target=work)
    thread.start()
    for n in (1, 4, 2, 3) * 5:
        cpu.load().set_num_threads(n)
    thread.join()
    assert results == [True] * 100


def test_short_jobs_of_changing_size_run_every_block_once(native):
    kernels.set_num_threads(4)
    packed = [kernels.pack_linear(torch.ones(n, 512)) for n in (96, 320, 1000)]
    totals = [torch.zeros(1, layer.n) for layer in packed]
    x = torch.ones(1, 512)
    for _ in range(400):
        for layer, total in zip(packed, totals, strict=True):
            kernels.linear(x, layer, total, accumulate=True)
    for total in totals:
        assert (total == 400 * 512).all()


FORK = """
import os, torch
from headrace import cgroup, kernels
kernels.set_num_threads(2)
packed = kernels.pack_linear(torch.randn(300, 400).bfloat16())
x = torch.randn(40, 400)
want = kernels.linear(x, packed)
child = os.fork()
same = bool((kernels.linear(x, packed) == want).all())
if child == 0:
    os._exit(0 if same else 3)
_, status = os.waitpid(child, 0)
print(same, os.waitstatus_to_exitcode(status), kernels.report()[0].implementation)
"""


def test_a_forked_child_computes_too(least_isa):
    env = {**os.environ, cpu.ISA_VARIABLE: least_isa}
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == f"True 0 native ({least_isa})", done.stderr
