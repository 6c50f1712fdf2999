"""scripts/serve and scripts/test set up what is missing, once; in a checkout whose setup installs nothing."""

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Stands for python, g++ and everything in .venv/bin: says how it was called. `-m venv` makes such a .venv. Installing Headrace says what
# SAID holds, and fails where FAILS is set.
TOOL = """#!/usr/bin/env bash
printf '%s %s\\n' "${0##*/}" "$*" >>"$CALLS"
[[ "$*" != *" -e "* ]] || { printf '%b' "${SAID:-}" && [ -z "${FAILS:-}" ] || exit 1; }
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

    run.folder, run.tools = folder, tools
    return run


def installs(calls):
    """What Headrace was installed with: ".", ".[dev,bench]" ..."""
    return [call.rpartition(" ")[2] for call in calls if " -e " in call]


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


def test_who_sets_up_alone_gets_what_a_user_needs_and_the_rest_when_asked(checkout):
    assert installs(checkout("scripts/setup")) == ["."]
    assert installs(checkout("scripts/setup", "--dev")) == [".[dev,bench]"]
    assert installs(checkout("scripts/setup")) == [".[dev,bench]"]


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


PROGRESS = (
    "Downloading https://index/some_wheel-1.0.whl (2 MB)\\nProgress 1000000 of 2000000\\n[7/9] Building CXX object\\n"
)


def test_a_terminal_shows_how_far_downloads_and_the_compiler_are(checkout, monkeypatch):
    monkeypatch.setenv("SAID", PROGRESS)
    master, terminal = os.openpty()
    try:
        checkout("scripts/setup", stdout=terminal)
    finally:
        os.close(terminal)
    shown = b""
    with open(master, "rb", buffering=0) as reader, contextlib.suppress(OSError):  # so a terminal ends
        while part := reader.read(4096):
            shown += part

    assert "\r\x1b[K  some_wheel: 1 of 2 MB\r\x1b[K  compiling: 7 of 9\r\x1b[K" in shown.decode()


def test_a_log_shows_only_the_stages(checkout, monkeypatch):
    monkeypatch.setenv("SAID", PROGRESS)
    checkout("scripts/setup")
    *stages, done = checkout.shown.splitlines()

    assert [int(re.match(r"\[(\d)/7 +\d+s\] ", line)[1]) for line in stages] == [1, 2, 3, 4, 5, 6, 7]
    assert done.startswith("done in ")
    assert "[7/9] Building CXX object" in (checkout.folder / ".venv/setup.log").read_text()


def test_when_pip_fails_the_end_of_what_it_said_is_shown(checkout, monkeypatch):
    monkeypatch.setenv("SAID", "kernel.cpp:1: error: no such kernel\\n")
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        checkout("scripts/setup")

    assert "error: no such kernel" in failed.value.stderr
    assert "setup.log" in failed.value.stderr


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
