"""Tables in narrow terminals."""

import io

from rich.console import Console
from rich.table import Column, Table

from headrace.benchmark.tables import print_table


def printed(width: int, table: Table) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_table(console, table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def models() -> Table:
    table = Table("name", "state", Column("file", overflow="fold"), title="Models", title_justify="left")
    table.add_row("[bold]a-rather-long-name[/bold]", "[green]installed[/green]", "/a/path/" + "x" * 60)
    table.add_row("b", "missing", "")
    return table


def test_a_table_that_fits_is_a_table():
    lines = printed(80, models())
    assert lines[1].startswith("┏")
    assert "a-rather-long-name" in lines[4]


def test_in_a_narrow_terminal_rows_become_lines_and_nothing_is_cut():
    assert printed(50, models()) == [
        "Models",
        "a-rather-long-name",
        "  state: installed",
        "  file: /a/path/" + "x" * 60,
        "b",
        "  state: missing",
    ]


def test_long_texts_are_wrapped_at_words_and_indented():
    table = Table("op", "why")
    table.add_row("some_operation_with_a_name", "one two three four five six seven eight")
    assert printed(30, table) == ["some_operation_with_a_name", "  why: one two three four five", "  six seven eight"]
