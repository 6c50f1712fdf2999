"""The parts of an engine as threads of this process (--single-process)."""

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace import log
from headrace.config.server_args import ServerArgs
from headrace.errors import ExecutionError
from headrace.garbage import give_back_free_memory
from headrace.messages.channel import Channels, LocalChannels
from headrace.messages.control import ReadyInfo
from headrace.processes.child_main import run_detokenizer
from headrace.processes.handshake import OnProgress, OnReady
from headrace.processes.parts import STOP_S, Parts
from headrace.processes.scheduler_process import run_scheduler

if TYPE_CHECKING:
    from headrace.frontend.tokenizer_manager import TokenizerManager

logger = log.get_logger(__name__)

START_POLL_S = 0.2

_Body = Callable[[ServerArgs, Channels, OnReady, OnProgress], None]


class ThreadParts(Parts):
    """One scheduler and the detokenizer, if it is not in the main process, each in a thread. They are not restarted."""

    def __init__(self, args: ServerArgs) -> None:
        super().__init__(LocalChannels(args.detokenize_in))
        self._args = args
        self._threads: list[threading.Thread] = []
        self._stopped = False
        self._ready: ReadyInfo | None = None
        self._started = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._on_death: Callable[[str], None] = lambda message: None

    def wait_ready(self, on_progress: OnProgress, should_stop: Callable[[], bool]) -> ReadyInfo:
        scheduler = functools.partial(run_scheduler, on_stall=self._stalled)
        bodies: list[tuple[str, _Body]] = [("scheduler", scheduler)]
        if self._args.detokenize_in == "process":
            bodies.append(("detokenizer", run_detokenizer))
        for name, run in bodies:
            thread = threading.Thread(target=self._guard, args=(name, run, on_progress), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        num_missing = len(self._threads)
        while num_missing and self._error is None and not should_stop():
            num_missing -= self._started.acquire(timeout=START_POLL_S)
        if num_missing or self._error is not None:
            self.stop()
            raise self._error or ExecutionError("stopped during start-up")
        assert self._ready is not None
        return self._ready

    def _guard(self, name: str, run: _Body, on_progress: OnProgress) -> None:
        """The body of a thread: reports its start, its failure to start, and its death."""
        started = False

        def progress(done: int, total: int) -> None:
            if self._stopped:
                raise ExecutionError("stopped during start-up")
            on_progress(done, total)

        def on_ready(info: ReadyInfo | None) -> None:
            nonlocal started
            self._ready = info or self._ready
            started = True
            self._started.release()

        try:
            run(self._args, self.channels, on_ready, progress)
        except BaseException as error:
            if not started:
                self._error = self._error or error
                self._started.release()
            elif not self._stopped:
                logger.exception("the %s thread died", name)
                self._on_death(f"the {name} died; the request was lost")

    def _stalled(self) -> None:
        """A step takes too long. The process belongs to the user, so it is not ended."""
        limit_s = self._args.watchdog_timeout_s
        self._on_death(f"a step took longer than {limit_s:g} s (--watchdog-timeout-s); the request was lost")

    def watch(self, manager: "TokenizerManager", on_death: Callable[[str], None]) -> None:
        self._on_death = on_death

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self.ask_to_leave()
        for thread in self._threads:
            thread.join(STOP_S)
        self.channels.close()
        give_back_free_memory()

    kill = stop
