"""The progress bar while the weights load, in a terminal or a notebook. Runs in the main process."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

from headrace.processes.handshake import OnProgress


@contextlib.contextmanager
def loading_bar() -> Iterator[OnProgress]:
    """On stderr, that it starts, then a bar of the weights; nothing when stderr is neither a terminal nor a notebook."""
    if not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
        yield _plain_bar
        return
    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status("starting", refresh_per_second=4))
        bar = Progress(*columns, console=console, transient=True)

        def show(done: int, total: int) -> None:
            if not bar.tasks:
                status.stop()
                bar.add_task("weights", total=total)
                stack.enter_context(bar)
            bar.update(bar.task_ids[0], completed=done, total=total)

        yield show


def _plain_bar(done: int, total: int) -> None:
    """A line of text that is written over. rich draws in a notebook with ipywidgets only, and warns where it is missing."""
    print(
        f"\rloading weights {100 * done // max(1, total):3} %",
        end="\n" if done >= total else "",
        file=sys.stderr,
        flush=True,
    )
