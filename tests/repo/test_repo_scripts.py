"""scripts/serve and scripts/test set up what is missing, once; in a checkout whose setup installs nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Stands for python, g++, cmake and everything in .venv/bin: says how it was called. `-m venv` makes such a .venv.
TOOL = """#!/usr/bin/env bash
printf '%s %s\\n' "${0##*/}" "$*" >>"$CALLS"
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
    for name in ("python3", "g++", "cmake"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.delenv("CXX", raising=False)

    def run(*command):
        calls.write_text("")
        subprocess.run([folder / command[0], *command[1:]], check=True, capture_output=True, cwd=tmp_path)
        return calls.read_text().splitlines()

    run.folder = folder
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
