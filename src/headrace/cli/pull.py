"""The commands `pull` and `models`: a progress bar, and tables of what is on this machine."""

from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table

from headrace.benchmark.tables import print_table
from headrace.checkpoint.files import best_mmprojs
from headrace.checkpoint.hub_cache import HubName, cache_folder, format_of, list_cached
from headrace.checkpoint.names import KNOWN_MODELS, list_models, pull


class _Bar:
    """A `PullProgress` on the terminal: one bar for all files, with the total."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", visible=False)
        self._num_files = self._number = 0

    def start(self, num_files: int, total_bytes: int) -> None:
        self._num_files, self._number = num_files, 0
        self._progress.reset(self._task, total=total_bytes, completed=0, visible=True)

    def file(self, name: str) -> None:
        self._number += 1
        self._progress.update(self._task, description=f"{self._number}/{self._num_files} {Path(name).name[:40]}")

    def advance(self, num_bytes: int) -> None:
        self._progress.advance(self._task, num_bytes)


def run_pull(name: str, console: Console) -> None:
    """Bring a model of a known name, or `org/name` from the Hugging Face Hub. Raises ModelError."""
    hub_name = None if name in KNOWN_MODELS else HubName.parse(name)
    if hub_name is None:
        path = pull(name)
    else:
        from headrace.checkpoint.hub_download import pull_from_hub

        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as progress:
            path = pull_from_hub(hub_name, _Bar(progress))
    console.print(f"{name} is ready: {path}", highlight=False, soft_wrap=True)
    if path.is_file():
        from headrace.checkpoint.gguf_mmproj import beside

        for encoder in best_mmprojs(file.name for file in beside(path)):
            console.print(f"vision encoder: {encoder}", highlight=False, soft_wrap=True)


def run_models(console: Console) -> None:
    table = Table("name", "what it is", "state", Column("file, or how to get it", overflow="fold"))
    for model in list_models():
        colour = "green" if model.state == "installed" else "yellow"
        place = str(model.path) if model.path is not None else model.get
        table.add_row(f"[bold]{model.name}[/bold]", model.description, f"[{colour}]{model.state}[/{colour}]", place)
    print_table(console, table)
    cached = list_cached()
    if not cached:
        console.print(
            f"No models in the Hugging Face cache ({cache_folder()}); headrace pull org/name brings one.",
            highlight=False,
            soft_wrap=True,
        )
        return
    table = Table(
        Column("in the Hugging Face cache", overflow="fold"), "format", Column("size", justify="right"), "revision"
    )
    for found in cached:
        table.add_row(found.name, format_of(found), decimal(found.num_bytes), found.commit[:12])
    print_table(console, table)
    console.print(f"in {cache_folder()}", highlight=False, soft_wrap=True)
