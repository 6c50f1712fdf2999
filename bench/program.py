"""What every program here shares: its command line, the words with which it refuses, and the JSON of what it found."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table

from headrace.benchmark.results import header, write_json
from headrace.errors import HeadraceError

Name = TypeVar("Name", bound=str)


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


def names_of(known: Sequence[Name]) -> Callable[[str], tuple[Name, ...]]:
    """The same of names that are known, at least one."""

    def chosen(text: str) -> tuple[Name, ...]:
        given = tuple(dict.fromkeys(words(text)))
        if not given or not set(given) <= set(known):
            raise argparse.ArgumentTypeError(f"takes any of {', '.join(known)}, got {text!r}")
        return tuple(name for word in given for name in known if name == word)

    return chosen


def table_of(title: str, texts: Sequence[str], numbers: Sequence[str], caption: str | None = None) -> Table:
    """An empty table. texts, numbers: the names of its columns, those of numbers behind the others and on the right."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


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
