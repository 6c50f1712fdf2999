"""What a child process is given when it starts, and what it reports until it can serve, its progress as a bar too. Imported by both sides."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from headrace.config.server_args import ServerArgs
from headrace.messages.channel import Ports
from headrace.messages.control import ReadyInfo
from headrace.messages.front import HttpWorkerStart
from headrace.processes.numa import Binding

Kind = Literal["scheduler", "follower", "detokenizer", "http"]

OnReady = Callable[[ReadyInfo | None], None]
"""Called once when a part can serve; a scheduler says what it has."""

OnProgress = Callable[[int, int], None]
"""Called while a part loads: bytes of the checkpoint so far, and in all."""


class RankStart(msgspec.Struct, frozen=True):
    """What a follower is given: its number among the ranks of all stages, and descriptors.

    group_fd: of the memory that all ranks share, None if they use the network; shard_fd: of that of its stage, None if it is the same or if
    it is alone there; before_fd, after_fd: of the links from the stage before and to the one after, None without stages, and if that stage
    is on another host. binding: with --numa-bind.
    """

    rank: int
    group_fd: int | None = None
    shard_fd: int | None = None
    before_fd: int | None = None
    after_fd: int | None = None
    binding: Binding | None = None

    @property
    def descriptors(self) -> list[int]:
        return [*self.of_groups, *self.of_links]

    @property
    def of_groups(self) -> list[int]:
        return [fd for fd in (self.group_fd, self.shard_fd) if fd is not None]

    @property
    def of_links(self) -> list[int]:
        return [fd for fd in (self.before_fd, self.after_fd) if fd is not None]


class Bootstrap(msgspec.Struct, frozen=True):
    """What a child is given.

    parent_pid: see `lifeline`. index, source: of a scheduler, see `run_scheduler`; index of a follower: its scheduler's. http: of an HTTP
    worker. rank: of a follower.
    """

    args: ServerArgs
    ports: Ports
    report_fd: int
    parent_pid: int
    index: int = 0
    source: int = 0
    http: HttpWorkerStart | None = None
    rank: RankStart | None = None


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Bytes of the checkpoint loaded so far."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child can serve. info: of a scheduler."""

    info: ReadyInfo | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    kind: Literal["config", "model", "other"]
    message: str


Report = Progress | Ready | Failed


def process_name(kind: Kind, args: ServerArgs, index: int, rank: RankStart | None = None) -> str:
    """What a child is called in messages, heartbeats and metrics."""
    if rank is not None:
        return f"rank {rank.rank} of the {process_name('scheduler', args, index)}"
    if kind == "http":
        return f"HTTP worker {index}"
    return f"{kind} {index}" if kind == "scheduler" and args.num_replicas > 1 else kind


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
