"""The child's side: `python -m headrace.processes.child_main KIND` becomes a scheduler, a follower, the detokenizer or an HTTP
worker.

Reads one JSON line on stdin, see `handshake`, and writes JSON lines on the descriptor named there: progress while it loads, then
"ready" or "error". A child ignores SIGINT and SIGTERM, because its parent drains and tells it to leave; it ends at once when the
parent has died. Each kind imports only what it runs.
"""

import contextlib
import gc
import os
import signal
import sys
import time
from typing import Literal, assert_never

import msgspec

from headrace import log
from headrace.errors import ConfigError, HeadraceError, ModelError
from headrace.messages.channel import Channels
from headrace.messages.control import ReadyInfo
from headrace.messages.sockets import SocketChannels
from headrace.processes import lifeline
from headrace.processes.handshake import IGNORED, Bootstrap, Failed, Kind, Progress, Ready, Report


class Reporter:
    """The child's end of the report pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._encoder = msgspec.json.Encoder()
        self._next_s = 0.0
        self._closed = False

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """A few times a second at most."""
        now = time.monotonic()
        if now >= self._next_s or done_bytes == total_bytes:
            self._next_s = now + 0.1
            self._write(Progress(done_bytes, total_bytes))

    def ready(self, info: ReadyInfo | None) -> None:
        """The last word of a child that can serve."""
        self._write(Ready(info))
        self._close()

    def failed(self, error: BaseException) -> None:
        """The last word of a child that cannot. Nothing once it was ready."""
        kind: Literal["config", "model", "other"] = "other"
        if isinstance(error, ConfigError):
            kind = "config"
        elif isinstance(error, ModelError):
            kind = "model"
        text = error.message if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
        self._write(Failed(kind, text))
        self._close()

    def _write(self, report: Report) -> None:
        if self._closed:
            return
        # A parent that is gone or no longer listens: the lifeline deals with the first.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, self._encoder.encode(report) + b"\n")

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._fd)


def main() -> None:
    """Entry of a child."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    kind = msgspec.convert(sys.argv[1], Kind)
    bootstrap = msgspec.json.decode(sys.stdin.buffer.readline(), type=Bootstrap)
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


def _run(kind: Kind, bootstrap: Bootstrap, channels: Channels, reporter: Reporter) -> None:
    """The body of this kind of child. What the others need is not imported."""
    args = bootstrap.args

    def on_ready(info: ReadyInfo | None) -> None:
        reporter.ready(info)
        # What is there now stays: collections of garbage need not go through it.
        gc.collect()
        gc.freeze()

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
            from headrace.processes.follower_process import run_follower

            assert bootstrap.rank is not None
            run_follower(args, on_ready, reporter.progress, bootstrap.rank)
        case "detokenizer":
            from headrace.processes.detokenizer_process import run_detokenizer

            run_detokenizer(args, channels, on_ready, reporter.progress)
        case "http":
            from headrace.processes.http_process import run_http_worker

            assert bootstrap.http is not None
            run_http_worker(args, channels, on_ready, bootstrap.http)
        case _:
            assert_never(kind)


if __name__ == "__main__":
    main()
