"""Child processes: how they are started, what they tell their parent, and how they end. Part of the composition root.

`python -m headrace.processes.child KIND` reads one JSON line on stdin (options and addresses: nothing of it shows in `ps`) and writes JSON
lines on the descriptor named there: progress while it loads, then "ready" or "error". A child ignores SIGINT and SIGTERM, because
its parent drains and tells it to leave; it ends at once when the parent, which keeps that stdin open, has died.
"""

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ExecutionError, HeadraceError, ModelError
from headrace.messages.channel import Ports
from headrace.messages.control import ReadyInfo
from headrace.messages.front import HttpWorkerStart
from headrace.processes import lifeline
from headrace.processes.environment import child_environment

Kind = Literal["scheduler", "detokenizer", "http"]


class Bootstrap(msgspec.Struct, frozen=True):
    """What a child is given. parent_pid: see `lifeline`. index, source: of a scheduler, see `run_scheduler`. http: of an HTTP worker."""

    args: ServerArgs
    ports: Ports
    report_fd: int
    parent_pid: int
    index: int = 0
    source: int = 0
    http: HttpWorkerStart | None = None


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Bytes of the checkpoint loaded so far."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child can serve. info: of a scheduler."""

    info: ReadyInfo | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child cannot serve."""

    kind: Literal["config", "model", "other"]
    message: str


Report = Progress | Ready | Failed


def process_name(kind: Kind, args: ServerArgs, index: int) -> str:
    """What a child is called in messages, heartbeats and metrics."""
    if kind == "http":
        return f"HTTP worker {index}"
    return f"{kind} {index}" if kind == "scheduler" and args.dp_size > 1 else kind


def environment(own: Mapping[str, str], kind: Kind, args: ServerArgs, index: int) -> dict[str, str]:
    """Ours without what may be secret. A replica sees one GPU: its own of those that we may use."""
    given = child_environment(own, args.child_env)
    if kind != "scheduler" or args.dp_size == 1 or args.device == "cpu":
        return given
    visible = [name.strip() for name in own.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not visible:
        return {**given, "CUDA_VISIBLE_DEVICES": str(index)}
    # Beyond the last one it sees none, and `of_all_replicas` refuses.
    return {**given, "CUDA_VISIBLE_DEVICES": visible[index] if index < len(visible) else ""}


def without_secrets(args: ServerArgs) -> ServerArgs:
    """The options of a child: who may call, and where traces go, is the main process's business alone."""
    return replace(args, api_key=None, admin_api_key=None, api_key_file=None, otlp_traces_endpoint=None)


class ChildProcess:
    """A started child. `name` is its kind, with its number when there are several, for messages to people.

    index, source: of a scheduler, see `run_scheduler`; of an HTTP worker, which one and which life of it. http: what that one is given.
    info: what a scheduler said when it was ready. program: what runs, before its kind.
    """

    program: Sequence[str] = (sys.executable, "-m", "headrace.processes.child")

    def __init__(
        self,
        kind: Kind,
        args: ServerArgs,
        ports: Ports,
        index: int = 0,
        source: int = 0,
        http: HttpWorkerStart | None = None,
    ) -> None:
        self.name = process_name(kind, args, index)
        self.kind = kind
        self.index = index
        self.source = source
        self.info: ReadyInfo | None = None
        self._reports_fd, report_fd = os.pipe()
        # An HTTP worker decides who may call what; nobody else needs the keys.
        given = args if http is not None else without_secrets(args)
        bootstrap = Bootstrap(given, ports, report_fd, os.getpid(), index, source, http)
        self._popen = subprocess.Popen(
            [*self.program, kind],
            stdin=subprocess.PIPE,
            pass_fds=(report_fd,) if http is None else (report_fd, http.listening_fd),
            env=environment(os.environ, kind, args, index),
        )
        os.close(report_fd)
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; `wait_ready` says so
            # Left open: its end of file tells the child that we are gone.
            self._popen.stdin.write(msgspec.json.encode(bootstrap) + b"\n")
            self._popen.stdin.flush()
        self._buffer = b""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._popen.poll()

    def wait_ready(
        self,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> ReadyInfo | None:
        """Until the child can serve. Raises what it could not do it for; ExecutionError when it died without a word."""
        for report in self._reports(should_stop):
            match report:
                case Progress():
                    on_progress(report.done_bytes, report.total_bytes)
                case Ready():
                    self.info = report.info
                    return report.info
                case Failed(kind="config"):
                    raise ConfigError(report.message)
                case Failed(kind="model"):
                    raise ModelError(report.message)
                case Failed():
                    raise ExecutionError(report.message)
        if should_stop():
            raise ExecutionError("stopped while starting")
        raise ExecutionError(f"the {self.name} process died while starting (exit code {self._popen.wait()})")

    def _reports(self, should_stop: Callable[[], bool]) -> Iterator[Report]:
        decoder = msgspec.json.Decoder(Report)
        try:
            while not should_stop():
                if not select.select([self._reports_fd], [], [], 0.2)[0]:
                    continue
                chunk = os.read(self._reports_fd, 65536)
                if not chunk:
                    return
                *lines, self._buffer = (self._buffer + chunk).split(b"\n")
                for line in lines:
                    yield decoder.decode(line)
        finally:
            os.close(self._reports_fd)

    def stop(self, timeout_s: float) -> None:
        """Wait for the child to leave on its own (it has been told to); kill it when it does not."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        self._reap()

    def end(self) -> None:
        """End it now, and leave it to whoever watches it to see that."""
        self._popen.kill()

    def kill(self) -> None:
        """End it now."""
        self._popen.kill()
        self._reap()

    def _reap(self) -> None:
        self._popen.wait()
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what a child that died at once did not read
            self._popen.stdin.close()


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    kind = sys.argv[1]
    bootstrap = msgspec.json.decode(sys.stdin.buffer.readline(), type=Bootstrap)
    lifeline.follow(sys.stdin.fileno(), bootstrap.parent_pid, lambda: os._exit(1))
    from headrace import log
    from headrace.launch import run_detokenizer, run_http_worker, run_scheduler
    from headrace.messages.channel import ZmqChannels

    log.configure(bootstrap.args.log_level, kind)
    reporter = Reporter(bootstrap.report_fd)
    channels = ZmqChannels(bootstrap.ports)

    def ready(info: ReadyInfo | None) -> None:
        reporter.ready(info)
        # What is there now stays: collections of garbage need not go through it.
        gc.collect()
        gc.freeze()

    try:
        if kind == "scheduler":
            run_scheduler(
                bootstrap.args,
                channels,
                ready,
                reporter.progress,
                replica=bootstrap.index,
                source=bootstrap.source,
            )
        elif bootstrap.http is not None:
            run_http_worker(bootstrap.args, channels, ready, bootstrap.http)
        else:
            run_detokenizer(bootstrap.args, channels, ready, reporter.progress)
    except HeadraceError as error:
        reporter.failed(error)
        sys.exit(2)
    except BaseException as error:
        reporter.failed(error)
        raise
    finally:
        channels.close()


if __name__ == "__main__":
    main()
