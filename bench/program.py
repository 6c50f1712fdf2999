"""What every program here shares: its command line, the words with which it refuses, and the JSON of what it found."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.benchmark.results import header, write_json
from headrace.errors import HeadraceError


def parser_of(description: str | None, *, output: bool = True) -> argparse.ArgumentParser:
    """A command line with the docstring of its module as help. output: with the option `--output`."""
    parser = argparse.ArgumentParser(
        prog=_command(), description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if output:
        parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser


def words(text: str) -> tuple[str, ...]:
    """The type of an option with several values, separated by commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def counts(text: str) -> tuple[int, ...]:
    """The same of positive whole numbers."""
    if not all(word.isdigit() and int(word) > 0 for word in words(text)):
        raise argparse.ArgumentTypeError(f"takes positive whole numbers, separated by commas, got {text!r}")
    return tuple(map(int, words(text)))


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """An error of Headrace ends the program with its words, not with a traceback."""
    try:
        yield
    except HeadraceError as error:
        sys.exit(f"error: {error.message}")


def report_of(kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What a program has found, with its command, commit and machine."""
    return {**header(kind, _command()), **found}


def write_report(found: Mapping[str, Any], output: Path | None) -> None:
    """Print what a program has found as JSON, and write it into a file if there is one."""
    report = report_of(_command().split(".")[-1], found)
    print(json.dumps(report, indent=1), flush=True)
    if output is not None:
        write_json(output, report)


def _command() -> str:
    """As it is typed: python -m bench.NAME."""
    module = Path(sys.argv[0])
    package = Path(__file__).parent
    if not module.is_relative_to(package):
        return module.name
    parts = module.relative_to(package.parent).with_suffix("").parts
    return "python -m " + ".".join(part for part in parts if part != "__main__")
