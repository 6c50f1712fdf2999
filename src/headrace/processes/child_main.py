"""The child's side: `python -m headrace.processes.child_main KIND` becomes a scheduler, a follower, the detokenizer or an HTTP
worker.

Reads one JSON line on stdin, see `handshake`, and writes JSON lines on the descriptor named there: progress while it loads, then
"ready" or "error". A child ignores SIGINT and SIGTERM, because its parent drains and tells it to leave; it ends at once when the
parent has died. Each kind imports only what it runs.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Literal, assert_never

import msgspec

from headrace import garbage, log
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, HeadraceError, ModelError
from headrace.messages.channel import Channels, FanOutSender
from headrace.messages.control import ReadyInfo
from headrace.messages.front import FrontNews, HttpWorkerStart
from headrace.messages.sockets import SocketChannels
from headrace.metrics.watchdog import Watchdog
from headrace.processes import lifeline
from headrace.processes.early import IGNORED, IS_EARLY
from headrace.processes.handshake import (
    Bootstrap,
    Failed,
    Kind,
    OnProgress,
    OnReady,
    Progress,
    RankStart,
    Ready,
    Report,
)
from headrace.processes.model_files import ModelFiles
from headrace.processes.numa import bind

if TYPE_CHECKING:
    from headrace.server.context import ServedModel


class Reporter:
    """The child's end of the report pipe."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._next_s = 0.0

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """A few times a second at most."""
        now = time.monotonic()
        if now >= self._next_s or done_bytes == total_bytes:
            self._next_s = now + 0.1
            self._write(Progress(done_bytes, total_bytes))

    def ready(self, info: ReadyInfo | None) -> None:
        """The last word of a child that can serve."""
        self._write(Ready(info), is_last=True)

    def failed(self, error: BaseException) -> None:
        """The last word of a child that cannot. Nothing once it was ready."""
        kind: Literal["config", "model", "other"] = "other"
        if isinstance(error, ConfigError):
            kind = "config"
        elif isinstance(error, ModelError):
            kind = "model"
        text = error.message if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
        self._write(Failed(kind, text), is_last=True)

    def _write(self, report: Report, is_last: bool = False) -> None:
        if self._fd is None:
            return
        # A parent that is gone or no longer listens: the lifeline deals with the first.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, msgspec.json.encode(report) + b"\n")
        if is_last:
            os.close(self._fd)
            self._fd = None


def main() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    garbage.pause()
    kind = msgspec.convert(sys.argv[1], Kind)
    if sys.argv[2:] == [IS_EARLY]:
        threading.Thread(target=_import_torch, name="import", daemon=True).start()
    told = sys.stdin.buffer.readline()
    if not told:  # nobody needs it
        os._exit(1)
    bootstrap = msgspec.json.decode(told, type=Bootstrap)
    lifeline.follow(sys.stdin.fileno(), bootstrap.parent_pid, lambda: os._exit(1))
    if kind == "follower":
        lifeline.die_with(bootstrap.parent_pid)  # whose main thread has started it
    name = kind if bootstrap.rank is None else f"rank {bootstrap.rank.rank}"
    log.configure(bootstrap.args.log_level, name, bootstrap.args.log_format)
    reporter = Reporter(bootstrap.report_fd)
    channels = SocketChannels(bootstrap.ports)
    try:
        _run(kind, bootstrap, channels, reporter)
    except HeadraceError as error:
        reporter.failed(error)
        sys.exit(2)
    except BaseException as error:
        reporter.failed(error)
        raise
    finally:
        channels.close()


def _import_torch() -> None:
    """What takes longest of a scheduler's imports, which wait for it."""
    with contextlib.suppress(Exception):  # they raise it again
        import headrace.execution.build  # noqa: F401


def _run(kind: Kind, bootstrap: Bootstrap, channels: Channels, reporter: Reporter) -> None:
    """The body of this kind of child. What the others need is not imported."""
    args = bootstrap.args

    def on_ready(info: ReadyInfo | None) -> None:
        reporter.ready(info)
        garbage.settle()

    match kind:
        case "scheduler":
            from headrace.processes.scheduler_process import run_scheduler

            run_scheduler(
                args,
                channels,
                on_ready,
                reporter.progress,
                replica=bootstrap.index,
                source=bootstrap.source,
                ports=bootstrap.ports,
            )
        case "follower":
            assert bootstrap.rank is not None
            run_follower(args, on_ready, reporter.progress, bootstrap.rank)
        case "detokenizer":
            run_detokenizer(args, channels, on_ready, reporter.progress)
        case "http":
            assert bootstrap.http is not None
            run_http_worker(args, channels, on_ready, bootstrap.http)
        case _:
            assert_never(kind)


def run_follower(args: ServerArgs, on_ready: OnReady, on_progress: OnProgress, rank: RankStart) -> None:
    """Run the leader's steps until it says that there are no more.

    on_progress: called once, if the leader waits for the weights.
    Raises ConfigError or ModelError before `on_ready`, and ExecutionError when the group of the ranks breaks.
    """
    bindings = [] if rank.binding is None else [rank.binding]
    for binding in bindings:
        bind(binding)
    from headrace.execution.build import build_follower  # imports torch, which takes longest
    from headrace.execution.ranks import group_of
    from headrace.processes.rank_groups import joined_follower
    from headrace.processes.share import share_of_machine

    with joined_follower(args, rank) as own:
        group = group_of(own)

        def on_loaded() -> None:
            on_progress(1, 1)
            group.ready()

        runner, resources = build_follower(share_of_machine(args, bindings), own, on_loaded)
        with resources:
            on_ready(None)
            group.ready()
            runner.follow()


def run_detokenizer(args: ServerArgs, channels: Channels, on_ready: OnReady, on_progress: OnProgress) -> None:
    """Turn token ids into text until a ShutdownReq, in a process or, with --single-process, in a thread. Raises ModelError before `on_ready`."""
    from headrace.text.detokenizer_manager import DetokenizerManager

    receiver = channels.receiver("to_detokenizer")
    watchdog = Watchdog("detokenizer", args.soft_watchdog_timeout_s)
    manager = DetokenizerManager(
        ModelFiles(args, encodes=False).tokenizer,
        channels.sender("to_tokenizer"),
        FanOutSender([channels.sender("to_scheduler", replica) for replica in range(args.num_replicas)]),
        enable_faults=args.enable_fault_injection,
        watchdog=watchdog,
    )
    watchdog.start()
    on_ready(None)
    manager.run(receiver, heartbeats=not args.single_process)
    watchdog.stop()


def run_http_worker(args: ServerArgs, channels: Channels, on_ready: OnReady, start: HttpWorkerStart) -> None:
    """Serve HTTP over the main process's front end until a ShutdownReq. Raises ConfigError or ModelError before `on_ready`."""
    import uvloop

    files = ModelFiles(args)
    model = files.served(start.ready)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_http(args, channels, on_ready, start, files, model))


async def _serve_http(
    args: ServerArgs,
    channels: Channels,
    on_ready: OnReady,
    start: HttpWorkerStart,
    files: ModelFiles,
    model: "ServedModel",
) -> None:
    from headrace.server.app import create_app
    from headrace.server.context import ServerStatus
    from headrace.server.listener import Server
    from headrace.server.request_frontend import RemoteCalls, remote_frontend

    status = ServerStatus()
    calls = RemoteCalls(start.number, channels.sender("to_front"), channels.receiver("to_worker", start.slot))
    frontend, loop = remote_frontend(calls), asyncio.get_running_loop()
    files.watch_templates(lambda: loop.call_soon_threadsafe(frontend.count_template_kill))
    app = create_app(frontend, args, model, status)
    server = Server(app, args, listening=socket.socket(fileno=start.listening_fd))

    def on_news(before: FrontNews, news: FrontNews) -> None:
        status.draining = not news.accepting
        if before.log_level != news.log_level:
            log.set_level(news.log_level)
        if before.keys_generation != news.keys_generation and app.state.keys is not None:
            app.state.keys.reload()

    calls.on_news = on_news
    calls.on_shutdown = server.shutdown
    calls.start()
    await calls.wait_for_news()
    collecting = asyncio.create_task(garbage.keep_collecting())
    await server.serve(lambda: on_ready(None))
    collecting.cancel()


if __name__ == "__main__":
    main()
