"""The reports of the programs in `benchmarks/`: JSON with the command, the commit and the machine."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.benchmark.machine import revision, this_machine


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option `--output`."""
    parser.add_argument("--output", type=Path, help="JSON file to write")


def write_report(found: Mapping[str, Any], program: Path, output: Path | None) -> None:
    """Print what a program has found, and write it into a file if there is one. program: its own file, for the commit."""
    report = {"command": sys.argv, **asdict(revision(program)), "machine": asdict(this_machine()), **found}
    text = json.dumps(report, indent=1)
    print(text, flush=True)
    if output is not None:
        output.write_text(text + "\n")
