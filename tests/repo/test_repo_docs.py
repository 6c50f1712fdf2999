"""Documents that can be checked against the code are."""

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from option_pages import markdown, options

from headrace.benchmark.workloads import PRESETS
from headrace.checkpoint.weight_formats import names_on_cpu, names_on_gpus
from headrace.cli.app import app
from headrace.config.other_servers import find, table
from headrace.config.server_args import ServerArgs
from headrace.config.server_options import flag
from headrace.config.settings import own_options

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCES = DOCS.parent / "src" / "headrace"
ARCHITECTURE = (DOCS / "architecture.md").read_text()
ROOMS = ARCHITECTURE.split("## Rooms")[1].split("## ")[0]
FAMILIES = SOURCES / "families"
"""Its modules are found by their names: a new one needs no line anywhere."""
PACKAGES = sorted(init.parent for init in SOURCES.rglob("__init__.py") if FAMILIES not in init.parents[1:])
BENCH = sorted(init.parent for init in (DOCS.parent / "bench").rglob("__init__.py"))


def commands():
    """Names as typed: `serve`, `bench serving` ..."""
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from (f"{name} {sub}" for sub in command.commands)
        else:
            yield name


def test_python_in_the_pages_runs_from_the_top(tmp_path):
    """Names are imported or made before they are used, in the first block of a page or in the order of the blocks."""
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    for page in pages:
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        (tmp_path / f"{page.stem}.py").write_text("\n".join(blocks))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821,E9", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_cli_docs_hold_the_table_of_options():
    text = options()

    assert text in (DOCS / "cli.md").read_text(), (
        "docs/cli.md is out of date; replace its tables by the output of: python tests/repo/option_pages.py cli"
    )
    for f in fields(ServerArgs):
        assert f"| `{flag(f.name)}" in text
        assert f.default is not True or f"`{flag(f'no_{f.name}')}` turns it off." in text
    assert "`--dtype {auto,float32,bfloat16,float16}` | `auto`" in text
    assert "HEADRACE_API_KEY" in text


@pytest.mark.parametrize("server", ["sglang", "vllm"])
def test_the_pages_of_other_servers_hold_their_tables_of_options(server):
    assert markdown(server) in (DOCS / f"coming-from-{server}.md").read_text(), (
        f"replace the tables under Options by the output of: python tests/repo/option_pages.py {server}"
    )


def test_the_tables_of_other_servers_have_no_option_of_ours():
    ours = own_options().keys()
    names = {name for entry in table() for name in entry.names}
    both = sorted(names & ours) + sorted(name for name in ours if (entry := find(name)) and entry.refused)
    assert both == [], "these are options now: take them out of config/other_servers.toml, and renew the pages"


@pytest.mark.parametrize("name", list(commands()))
def test_cli_docs_name_every_command(name):
    assert f"headrace {name}" in (DOCS / "cli.md").read_text()


@pytest.mark.parametrize("name", list(PRESETS))
def test_benchmarking_docs_describe_every_preset(name):
    assert f"| `{name}` |" in (DOCS / "benchmarking.md").read_text()


@pytest.mark.parametrize("name", names_on_cpu())
def test_quantization_docs_describe_every_format_of_a_cpu(name):
    assert f"| `{name}` |" in (DOCS / "quantization.md").read_text()


@pytest.mark.parametrize("name", names_on_gpus())
def test_gpu_docs_describe_every_format_of_a_gpu(name):
    assert f"| `{name}` |" in (DOCS / "gpu.md").read_text()


def coming_capabilities() -> list[list[str]]:
    """Rows of the table of what comes: capability, its own room, existing files."""
    table = ARCHITECTURE.split("| capability |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def modules_in(text: str) -> list[str]:
    """`room/module.py` or `module.py` as written in a document."""
    return [name for name in re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b", text) if not name.startswith("tests/")]


def test_modules_that_the_architecture_names_exist():
    coming = {name for row in coming_capabilities() for name in modules_in(row[1])}
    named = set(modules_in(ARCHITECTURE)) - coming

    assert len(named) > 40
    assert sorted(name for name in named if not (SOURCES / name).is_file()) == []


def test_the_architecture_names_every_package():
    packages = {str(package.relative_to(SOURCES)) for package in PACKAGES} - {"."}

    assert len(packages) > 20
    assert sorted(name for name in packages if f"`{name}/`" not in ROOMS) == []


@pytest.mark.parametrize(
    "package",
    [package for package in PACKAGES + BENCH if package != FAMILIES],
    ids=lambda path: str(path.relative_to(DOCS.parent)),
)
def test_the_docstring_of_a_package_names_its_modules_and_no_others(package):
    """By file name; a module of another package by its path."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    named = set(re.findall(r"(?<![\w/.])(?:[a-z_0-9]+/)*[a-z_0-9]+\.py\b", docstring))
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}

    assert sorted(modules - named) == []
    assert sorted(name for name in named - modules if "/" not in name or not (SOURCES / name).is_file()) == []


def test_each_coming_capability_touches_at_most_six_files():
    touched = {capability: len(modules_in(files)) for capability, _, files in coming_capabilities()}

    assert len(touched) >= 6
    assert {capability for capability, num_files in touched.items() if num_files > 6} == set()


def test_the_page_of_the_architecture_has_lines_that_fit():
    lines = ARCHITECTURE.splitlines()

    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_pages_are_wrapped_and_their_tables_narrow(page: Path):
    """Prose of at most 120 columns, but for what cannot be broken; tables of at most five columns."""
    prose = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())
    long = [
        line
        for line in prose.splitlines()
        if len(line) > 120 and not line.startswith("|") and " " in line[:120].strip()
    ]
    assert [line for line in long if not re.search(r"\]\(|`|<", line)] == []
    wide = [line for line in prose.splitlines() if re.fullmatch(r"\|[-:| ]+\|", line) and line.count("|") > 6]
    assert wide == []
