"""Child processes that try grammars, with limits of time and memory.

Owns the children: they are started when first needed, kept, replaced when they had to be killed or have grown, and ended by `close`. Does not
keep results (`compiler` does). Called from several threads of the scheduler's process; a call holds one child for as long as it takes.
"""

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec
import psutil

from headrace.errors import ExecutionError
from headrace.grammar.compile_child import MIB, READY, VERDICTS, Frames, Refused, Setup, Verdict
from headrace.grammar.vocabulary import Vocabulary
from headrace.log import get_logger
from headrace.messages.grammar import GrammarSpec

logger = get_logger(__name__)

PROGRAM = (sys.executable, "-m", "headrace.grammar.compile_child")

START_LIMIT_S = 60.0
"""How long a child may take to start: imports, and 2 us a token."""

PATIENCE = 6
"""A grammar may take this many times its limit of processor time if the machine has other things to do."""

MAX_LEFT_BYTES = 256 * MIB
"""A child that keeps more than this after a grammar is replaced."""

_ENVIRONMENT = frozenset({
    "PATH", "HOME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME",
    "PYTHONHASHSEED", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "ASAN_OPTIONS", "UBSAN_OPTIONS",
})  # fmt: skip
"""The variables that a child gets, of those there are."""

_SINGLE_THREADED = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}


class Child:
    """One child process, for one thread at a time."""

    def __init__(self, setup: msgspec.Raw, program: Sequence[str] = PROGRAM) -> None:
        """Start it and wait until it can try grammars. setup: a `Setup`. Raises ExecutionError."""
        ours, its = socket.socketpair()
        self._frames = Frames(ours)
        self._trying = threading.Lock()
        with its:
            try:
                self._popen = subprocess.Popen(
                    program,
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=child_environment(os.environ),
                )
            except OSError as error:
                self._frames.close()
                raise ExecutionError(f"no process to compile grammars could be started: {error.strerror}") from None
        try:
            self._frames.send(setup, START_LIMIT_S)
            self._frames.receive(READY, START_LIMIT_S)
        except (EOFError, OSError, msgspec.DecodeError):
            raise ExecutionError(
                f"a process to compile grammars did not start within {START_LIMIT_S:g} s (exit code {self.end()})"
            ) from None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended by itself."""
        return self._popen.poll() is not None

    def try_spec(self, spec: GrammarSpec, limit_s: float) -> Verdict:
        """Raises TimeoutError or EOFError; the child is of no use then. limit_s: of processor time, so that a busy machine refuses nothing."""
        with self._trying:
            before_s, give_up_s = self._processor_s(), time.monotonic() + PATIENCE * limit_s
            try:
                self._frames.send(spec, limit_s)
            except ConnectionError:
                raise EOFError("the child is gone") from None
            while not self._frames.wait(limit_s / 10):
                if self._processor_s() - before_s >= limit_s or time.monotonic() >= give_up_s:
                    raise TimeoutError
            return self._frames.receive(VERDICTS, limit_s)

    def _processor_s(self) -> float:
        """Seconds of processor time that the child has taken; 0 if it is gone."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def end(self) -> int:
        """Kill it, unless it has ended, and wait for its end. Returns its exit code. Idempotent, from any thread."""
        self._popen.kill()
        code = self._popen.wait()
        with self._trying:  # a thread that waits for its answer finds that the child is gone
            self._frames.close()
        return code


class CompilePool:
    """Tries grammars in children.

    limit_s: processor time for one grammar. memory_bytes: memory for one, beyond the child's own. program: the command that a child runs.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        num_children: int = 2,
        limit_s: float = 5.0,
        memory_bytes: int = 1024 * MIB,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        # Once for all children, because it takes the other threads' time.
        self._setup = msgspec.Raw(msgspec.msgpack.encode(Setup(vocabulary, memory_bytes)))
        self._memory_bytes = memory_bytes
        self._limit_s = limit_s
        self._program = program
        self._lock = threading.Lock()
        self._living: set[Child] = set()
        self._closed = False
        self.num_killed = 0
        # The child that was used last is used first; None is one that is yet to be started.
        self._free: queue.LifoQueue[Child | None] = queue.LifoQueue()
        for _ in range(num_children):
            self._free.put(None)

    def try_spec(self, spec: GrammarSpec) -> Verdict:
        """Whether a grammar can be served. Waits for a free child. Raises ExecutionError if it could not be tried."""
        child = self._free.get()
        try:
            child = self._fresh(child)
            verdict = self._try(child, spec)
            if verdict.left_bytes > MAX_LEFT_BYTES:
                logger.info("a grammar left %d MiB in a compile process, which is replaced", verdict.left_bytes // MIB)
                self._end(child)
            return verdict
        finally:
            self._free.put(child if child in self._living else None)

    def close(self) -> None:
        """End the children. Grammars that are being tried fail with ExecutionError."""
        with self._lock:
            self._closed = True
            living = list(self._living)
        for child in living:
            self._end(child)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        with self._lock:
            return [child.pid for child in self._living]

    def _fresh(self, child: Child | None) -> Child:
        """The child, or a new one if there is none or somebody else ended it."""
        if self._closed:
            raise _stopping()
        if child is not None:
            if not child.has_ended:
                return child
            self._end(child)
        child = Child(self._setup, self._program)
        with self._lock:
            self._living.add(child)
            closed = self._closed
        if closed:
            self._end(child)
            raise _stopping()
        return child

    def _try(self, child: Child, spec: GrammarSpec) -> Verdict:
        try:
            return child.try_spec(spec, self._limit_s)
        except TimeoutError:
            message = f"the grammar takes longer than {self._limit_s:g} s to compile"
        except EOFError:
            message = (
                f"the grammar takes more memory to compile than one may ({self._memory_bytes // MIB} MiB), "
                "or it is nested too deeply"
            )
        self._end(child)
        if self._closed:
            raise _stopping()
        with self._lock:
            self.num_killed += 1
        logger.warning("a compile process was ended: %s", message)
        return Refused(f"{message}; use a smaller one")

    def _end(self, child: Child) -> None:
        child.end()
        with self._lock:
            self._living.discard(child)


def _stopping() -> ExecutionError:
    return ExecutionError("the server is stopping")


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Those of `own` that a child gets: nothing that may be a secret. Its libraries use one thread."""
    return {name: value for name, value in own.items() if name in _ENVIRONMENT} | _SINGLE_THREADED
