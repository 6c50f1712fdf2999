"""Tables in the terminal, as such where they fit, else each row as a few lines; and bars of progress."""

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

_FOLDED = 24
"""Columns of the terminal that a column whose words may be cut (paths) gets at least."""


def print_table(console: Console, table: Table) -> None:
    """Print a table of texts. If words would have to be cut: its title, and for each row the first cell and lines `header: cell`."""
    if sum(_needed(column) + 3 for column in table.columns) + 1 <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title, style="bold")
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        console.print(cells[0], style="bold", highlight=False)
        for column, cell in zip(table.columns[1:], cells[1:], strict=True):
            if not str(cell):
                continue
            text = Text.from_markup(f"{column.header}: " if column.header else "").append_text(
                Text.from_markup(str(cell))
            )
            if column.overflow == "fold":
                console.print(Text("  ").append_text(text), soft_wrap=True, highlight=False)
            else:
                console.print(Padding(text, (0, 0, 0, 2), expand=False), highlight=False)


def progress_columns(counts: str) -> tuple[ProgressColumn, ...]:
    """Of the bar of a long run: its task's description, counts (a format of the task), and times."""
    return (
        TextColumn("{task.description} " + counts),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )


def _needed(column: Column) -> int:
    if column.overflow == "fold":
        return _FOLDED
    words = " ".join(Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells)).split()
    return max(map(len, words), default=0)
