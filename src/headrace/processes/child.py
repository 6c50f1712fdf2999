"""A child process as its parent sees it: how it is started, what it reports, and how it ends.

The child is `python -m headrace.processes.child_main KIND`. It is given one JSON line on stdin (options and addresses: nothing of it
shows in `ps`), and the parent keeps that stdin open: its end of file tells the child that the parent has died.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from headrace.config.machine import SECRET_VARIABLE
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ExecutionError, ModelError
from headrace.messages.channel import Ports
from headrace.messages.control import ReadyInfo
from headrace.messages.front import HttpWorkerStart
from headrace.processes import early
from headrace.processes.early import ENGINE_DEFAULTS, PROGRAM, child_environment
from headrace.processes.handshake import (
    Bootstrap,
    Failed,
    Kind,
    Progress,
    RankStart,
    Ready,
    Report,
    process_name,
)


def without_secrets(args: ServerArgs) -> ServerArgs:
    """The options that a child is given: only the main process checks keys and sends traces."""
    return replace(args, api_key=None, admin_api_key=None, api_key_file=None, otlp_traces_endpoint=None)


class ChildProcess:
    """A started child.

    name: its kind, with its number when there are several, for messages to people. index, source: of a scheduler, see `run_scheduler`; of
    an HTTP worker, its slot and its number, see `HttpWorkerStart`; index of a follower: its scheduler's. http: what an HTTP worker is given.
    rank: which a follower is. info: what a scheduler said when it was ready. program: the command that is run, without the kind.
    """

    program: Sequence[str] = PROGRAM

    def __init__(
        self,
        kind: Kind,
        args: ServerArgs,
        ports: Ports,
        index: int = 0,
        source: int = 0,
        http: HttpWorkerStart | None = None,
        rank: RankStart | None = None,
    ) -> None:
        self.name = process_name(kind, args, index, rank)
        self.kind = kind
        self.index = index
        self.source = source
        self.info: ReadyInfo | None = None
        own_environment, started = environment(os.environ, kind, args, index), None
        # What binds itself to a NUMA node, or starts other ranks, does so before it imports torch.
        if kind == "scheduler" and self.program == PROGRAM and not args.numa_bind and args.num_ranks == 1:
            started = early.take(own_environment)
        if started is None:
            passed = [*([] if http is None else [http.listening_fd]), *([] if rank is None else rank.descriptors)]
            started = early.started([*self.program, kind], own_environment, passed)
        self._popen, self._reports_fd = started.popen, started.reports_fd
        # An HTTP worker decides who may call what; nobody else needs the keys.
        given = args if http is not None else without_secrets(args)
        bootstrap = Bootstrap(given, ports, started.report_fd, os.getpid(), index, source, http, rank)
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; `wait_ready` says so
            # Left open: its end of file tells the child that we are gone.
            self._popen.stdin.write(msgspec.json.encode(bootstrap) + b"\n")
            self._popen.stdin.flush()
        self._buffer = b""

    @property
    def pid(self) -> int:
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
        """Wait until the child can serve; what a scheduler said of itself.

        Raises the child's own ConfigError, ModelError or ExecutionError, and ExecutionError when it died without reporting one.
        """
        try:
            while not isinstance(report := self._next_report(should_stop), Ready):
                on_progress(report.done_bytes, report.total_bytes)
        finally:
            os.close(self._reports_fd)
        self.info = report.info
        return report.info

    def wait_loaded(self) -> None:
        """Wait until the child says that it has loaded all; `wait_ready` comes after it. Raises as that does."""
        while not isinstance(report := self._next_report(), Ready) and report.done_bytes < report.total_bytes:
            pass

    def _next_report(self, should_stop: Callable[[], bool] = lambda: False) -> Progress | Ready:
        """Raises as `wait_ready` does."""
        match self._read_report(should_stop):
            case Failed(kind="config", message=message):
                raise ConfigError(message)
            case Failed(kind="model", message=message):
                raise ModelError(message)
            case Failed(message=message):
                raise ExecutionError(message)
            case Progress() | Ready() as report:
                return report
        if should_stop():
            raise ExecutionError("stopped during start-up")
        code = self._popen.wait()
        who = f"the process of {self.name}" if self.kind == "follower" else f"the {self.name} process"
        if code == -signal.SIGKILL and self.kind in ("scheduler", "follower"):
            raise ExecutionError(
                f"{who} was killed during start-up, most likely because memory ran out: "
                "lower --mem-fraction-static or --max-total-tokens, or use --quantization int8 or int4"
            )
        raise ExecutionError(f"{who} died during start-up (exit code {code})")

    def _read_report(self, should_stop: Callable[[], bool]) -> Report | None:
        while b"\n" not in self._buffer:
            if should_stop():
                return None
            if not select.select([self._reports_fd], [], [], 0.2)[0]:
                continue
            chunk = os.read(self._reports_fd, 65536)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        report: Report = msgspec.json.decode(line, type=Report)
        return report

    def stop(self, timeout_s: float) -> None:
        """Wait for a child that was told to leave, and kill it after `timeout_s`."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        self._reap()

    def end(self) -> None:
        """Kill it without waiting; the supervisor will notice its end."""
        self._popen.kill()

    def kill(self) -> None:
        """Kill it and wait for its end. Idempotent."""
        self._popen.kill()
        self._reap()

    def _reap(self) -> None:
        self._popen.wait()
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what a child that died at once did not read
            self._popen.stdin.close()


def stop_all(children: Iterable[ChildProcess], timeout_s: float) -> None:
    """`stop` of each, within `timeout_s` together."""
    deadline = time.monotonic() + timeout_s
    for child in children:
        child.stop(max(0.0, deadline - time.monotonic()))


def environment(own: Mapping[str, str], kind: Kind, args: ServerArgs, index: int) -> dict[str, str]:
    """Ours without what may be secret. A replica sees as many GPUs as it has ranks: its own of those that we may use."""
    given = child_environment(own, args.child_env)
    if kind in ("scheduler", "follower"):
        given = ENGINE_DEFAULTS | given
    needs_secret = args.num_nodes > 1 or args.disaggregation_mode != "null"
    if kind in ("scheduler", "follower") and needs_secret and SECRET_VARIABLE in own:
        given[SECRET_VARIABLE] = own[SECRET_VARIABLE]
    if kind != "scheduler" or args.num_replicas == 1 or args.device == "cpu":
        return given
    visible = [name.strip() for name in own.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    own_places = range(index * args.tp_size, (index + 1) * args.tp_size)
    if visible:
        # Beyond the last one it sees none, and `of_all_replicas` refuses.
        return {**given, "CUDA_VISIBLE_DEVICES": ",".join(visible[own_places.start : own_places.stop])}
    return {**given, "CUDA_VISIBLE_DEVICES": ",".join(map(str, own_places))}
