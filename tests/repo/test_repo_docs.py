"""Documents that can be checked against the code are."""

from pathlib import Path

import pytest
import typer

from headrace.benchmark.workloads import PRESETS
from headrace.checkpoint.weight_formats import names_on_cpu, names_on_gpus
from headrace.cli.app import app
from headrace.config.cli import options_markdown

DOCS = Path(__file__).resolve().parents[2] / "docs"


def commands():
    """Names as typed: `serve`, `bench serving` ..."""
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from (f"{name} {sub}" for sub in command.commands)
        else:
            yield name


def test_cli_docs_hold_the_table_of_options():
    assert options_markdown() in (DOCS / "cli.md").read_text(), (
        "docs/cli.md is out of date; replace its tables by the output of: python -m headrace.config.cli"
    )


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
