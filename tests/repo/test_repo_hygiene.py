"""What must hold for the tree as a whole."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LARGEST_FILE_BYTES = 1_000_000
GENERATED = {".whl", ".git", ".venv", "build", "dist", "__pycache__", "out"}

# Unpickling runs code of whoever wrote the bytes.
FORBIDDEN_IN_SOURCE = (r"\bpickle\b", r"\bdill\b", r"\brecv_pyobj\b", r"\bsend_pyobj\b", r"\btorch\.load\(")


def files(*folders, suffixes=()):
    """Files of the tree, generated ones left out."""
    for folder in folders or (".",):
        for parent, names, leaves in os.walk(ROOT / folder):
            names[:] = [name for name in names if name not in GENERATED and not name.endswith(("_cache", ".egg-info"))]
            for leaf in leaves:
                path = Path(parent, leaf)
                if path.is_file() and (not suffixes or path.suffix in suffixes):
                    yield path


def matches(pattern, paths):
    """`file:line: text` of every line that matches."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]


@pytest.mark.parametrize("pattern", FORBIDDEN_IN_SOURCE)
def test_nothing_that_could_run_foreign_code_is_used(pattern):
    assert matches(pattern, files("src", "bench", suffixes={".py"})) == []


@pytest.mark.parametrize(
    "folder",
    ["src", "csrc", "tests", "scripts", "constraints", "deploy", "docs", "examples", "bench", ".ci"],
)
def test_no_paths_of_one_machine(folder):
    # Assembled, so that this line does not find itself.
    pattern = "|".join("/" + name + "/" for name in ("work", "root", "home", "opt"))
    assert matches(rf"(?<![\w.$}}~])({pattern})[a-z]", text_files(folder)) == []


def text_files(*folders):
    """Without those that are built, drawn or recorded."""
    return (path for path in files(*folders) if path.suffix not in {".so", ".png", ".svg", ".json", ".gguf"})


def test_no_large_files():
    large = [
        str(path.relative_to(ROOT))
        for path in files()
        if path.suffix != ".so" and path.stat().st_size > LARGEST_FILE_BYTES
    ]
    assert large == []


def test_no_code_is_left_undone():
    pattern = r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b"
    assert matches(pattern, text_files("src", "csrc", "tests", "scripts", "bench")) == []


def test_every_package_says_what_it_is():
    silent = [
        str(path.relative_to(ROOT))
        for path in files("src", "bench", suffixes={".py"})
        if not path.read_text(encoding="utf-8").lstrip().startswith('"""')
    ]
    assert silent == []


def test_every_source_folder_is_a_package():
    folders = {path.parent for path in files("src", "bench", suffixes={".py"})}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize(
    "script",
    [
        "scripts/isa",
        "scripts/setup",
        "scripts/serve",
        "scripts/test",
        "scripts/sanitize",
        "scripts/soak",
        "scripts/count",
        "scripts/surface",
        ".ci/run",
        "bench/compare/setup",
    ],
)
def test_scripts_can_be_run_and_are_valid_bash(script):
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize(
    "script",
    ["scripts/setup", "scripts/test", "scripts/sanitize", "scripts/soak", "scripts/count", "bench/compare/setup"],
)
def test_scripts_explain_themselves_and_refuse_what_they_do_not_know(script, tmp_path):
    shown = subprocess.run([ROOT / script, "--help"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert shown.stdout.startswith("usage:")
    refused = subprocess.run([ROOT / script, "--nonsense"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert refused.returncode != 0
    assert "--nonsense" in refused.stderr


def test_ci_runs_what_a_contributor_runs():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if line.startswith("scripts/")] == [
        "scripts/setup --dev --all-isas --if-needed ||",  # every variant of the kernels, not this machine's alone
        "scripts/test",
        "scripts/count",
    ]


def test_commands_of_the_readme_exist():
    readme = (ROOT / "README.md").read_text()
    assert "\nscripts/serve smollm2\n" in readme
    assert "\nscripts/test\n" in readme


def test_the_cpu_constraints_keep_cuda_out():
    pins = (ROOT / "constraints/cpu.txt").read_text().splitlines()
    assert "torch==2.13.0+cpu" in pins
    assert [pin for pin in pins if pin.startswith(("nvidia", "cuda"))] == []
    assert [pin for pin in pins if not pin.startswith("#") and not re.fullmatch(r"[a-z0-9-]+==\S+", pin)] == []
