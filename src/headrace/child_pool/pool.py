"""The parent's side of a pool of child processes, with limits of time and memory.

Owns the children: they are started when first needed, kept, replaced when they had to be killed or have grown, and ended by `close`. Owns as well
the judgement of a child that was lost: whether its question is at fault, or the machine. Does not know what is asked and answered, nor whose turn
it is (`headrace.turns`, which `worked_s` tells what a thread and its children have cost). Called from several threads; a call holds one child for as
long as it takes.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import msgspec

from headrace.child_pool.child_side import MIB, Frames, Ready
from headrace.errors import CapacityError, ExecutionError
from headrace.log import get_logger

logger = get_logger(__name__)

START_LIMIT_S = 60.0
"""How long a child may take to start, its imports included."""

PATIENCE = 12
"""Work may take this many times its limit of processor time if the machine has other things to do."""

ATTEMPTS = 2
"""Children that are asked before a question waits for better times: one that is killed or gets no turn says nothing about the question."""

RETRY_AFTER_S = 5.0
WAIT_LIMIT_S = 180.0
"""How long a question may wait for its turn: one that takes all its limit leaves those of its tenant waiting for long."""

_CRASHES = frozenset({
    signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS, signal.SIGXCPU,
})  # fmt: skip
"""The signals by which a program ends itself. Others, such as the SIGKILL of the kernel's out-of-memory killer, come from elsewhere."""

MAX_LEFT_BYTES = 256 * MIB
"""A child that keeps more than this after its work is replaced."""

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

_READY = msgspec.msgpack.Decoder(Ready)


class Answer(Protocol):
    """What a child answers. left_bytes: by how much the child has grown since it was ready."""

    @property
    def left_bytes(self) -> int: ...


A = TypeVar("A", bound=Answer)


class ChildLostError(Exception):
    """The question is at fault: the child crashed or gave up at its work, most likely since that took too much memory or stack."""


class ChildLateError(Exception):
    """The question is at fault: the work took more than its limit of processor time, and the child was ended."""


class _ChildKilledError(Exception):
    """The child was killed from outside, or got no turn: nothing is known of the question. In the end of "a process to ... "."""


class _Asked(threading.local):
    """worked_s: processor time that children have taken for questions of this thread."""

    worked_s = 0.0


_asked = _Asked()


def worked_s() -> float:
    """Seconds of processor time that the calling thread has taken, and children for its questions; not what it took to start them."""
    return time.thread_time() + _asked.worked_s


class ChildProcess(Generic[A]):
    """One child process, for one thread at a time.

    purpose: what it is for, as the end of "a process to ...". program: what it runs. setup: what it is told first. answers: decodes what it says.
    """

    def __init__(
        self, purpose: str, program: Sequence[str], setup: msgspec.Raw, answers: msgspec.msgpack.Decoder[A]
    ) -> None:
        """Start it and wait until it can work. Raises ExecutionError, or _ChildKilledError if it was killed."""
        ours, its = socket.socketpair()
        self._frames = Frames(ours)
        self._answers = answers
        self._asking = threading.Lock()
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
                raise ExecutionError(f"no process to {purpose} could be started: {error.strerror}") from None
        try:
            self._frames.send(setup, START_LIMIT_S)
            self._frames.receive(_READY, START_LIMIT_S)
        except (EOFError, OSError, msgspec.DecodeError) as error:
            code = self.end()
            if isinstance(error, TimeoutError):
                raise _ChildKilledError(f"did not start within {START_LIMIT_S:g} s, for want of a processor") from None
            if _was_killed(code):
                raise _ChildKilledError(f"was killed while it started ({_name(code)})") from None
            raise ExecutionError(f"a process to {purpose} did not start ({_name(code)})") from None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended by itself."""
        return self._popen.poll() is not None

    def ask(self, question: msgspec.Struct, limit_s: float) -> A:
        """Raises ChildLateError, TimeoutError if it got no turn, or EOFError if it has ended; the child is of no use then. limit_s: of processor
        time, so that a busy machine refuses nothing. It is measured here, since RLIMIT_CPU counts the whole life of a child."""
        with self._asking:
            before_s, give_up_s = self._processor_s(), time.monotonic() + PATIENCE * limit_s
            try:
                self._frames.send(question, limit_s)
                while not self._frames.wait(limit_s / 10):
                    if self._processor_s() - before_s >= limit_s:
                        raise ChildLateError(f"took more than {limit_s:g} s of processor time")
                    if time.monotonic() >= give_up_s:
                        raise TimeoutError
                return self._frames.receive(self._answers, limit_s)
            except ConnectionError:
                raise EOFError("the child is gone") from None
            finally:
                _asked.worked_s += max(0.0, self._processor_s() - before_s)

    def end(self) -> int:
        """Kill it, unless it has ended, and wait for its end. Returns its exit code. Idempotent, from any thread."""
        self._popen.kill()
        code = self._popen.wait()
        with self._asking:  # a thread that waits for its answer finds that the child is gone
            self._frames.close()
        return code

    def _processor_s(self) -> float:
        """Seconds of processor time that the child has taken; 0 if it is gone."""
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # clock_getcpuclockid(3)
        except OSError:
            return 0.0


class ChildPool(Generic[A]):
    """Asks children. limit_s: processor time for one answer. max_left_bytes: see `MAX_LEFT_BYTES`. start_after_s: how long a question waits for a
    child that works before another one is started. The rest: see `ChildProcess`.

    on_lost: set by the owner; called, in the thread that asks, for each child that is lost at its work.
    """

    def __init__(
        self,
        purpose: str,
        program: Sequence[str],
        setup: msgspec.Struct,
        answers: msgspec.msgpack.Decoder[A],
        *,
        num_children: int,
        limit_s: float,
        max_left_bytes: int = MAX_LEFT_BYTES,
        start_after_s: float = 0.0,
    ) -> None:
        self._purpose = purpose
        self._program = program
        # Once for all children, because it takes the other threads' time.
        self._setup = msgspec.Raw(msgspec.msgpack.encode(setup))
        self._answers = answers
        self._limit_s = limit_s
        self._max_left_bytes = max_left_bytes
        self._lock = threading.Lock()
        self._living: set[ChildProcess[A]] = set()
        self._closed = False
        self.num_killed = 0
        self.on_lost: Callable[[], object] = lambda: None
        self._start_after_s = start_after_s
        # The child that was used last is used first; None is one that is yet to be started.
        self._num_children = num_children
        self._free: list[ChildProcess[A] | None] = [None] * num_children
        # A living one, for questions that are not large.
        self._ready: ChildProcess[A] | None = None
        self._returned = threading.Condition(self._lock)

    def ask(self, question: msgspec.Struct, is_large: bool = False) -> A:
        """Waits for a free child, and for its answer. is_large: that may take long, so one of several children is kept ready for others meanwhile.

        Raises ChildLateError or ChildLostError if the question is at fault, CapacityError if ATTEMPTS children were killed or got no turn, which
        is no property of the question, and ExecutionError if there is no child to ask.
        """
        child = self._take(is_large)
        try:
            for _ in range(ATTEMPTS):
                try:
                    child = self._fresh(child)
                    answer = self._ask(child, question)
                except (ChildLateError, ChildLostError, _ChildKilledError) as lost:
                    with self._lock:
                        self.num_killed += 1
                    self.on_lost()
                    logger.warning("a process to %s %s, and is replaced", self._purpose, lost)
                    if not isinstance(lost, _ChildKilledError):
                        raise
                    continue
                if answer.left_bytes > self._max_left_bytes:
                    logger.info(
                        "a process to %s has grown by %d MiB: replaced", self._purpose, answer.left_bytes // MIB
                    )
                    self._end(child)
                return answer
        finally:
            self._give_back(child)
        raise CapacityError(
            f"{ATTEMPTS} processes to {self._purpose} were killed or got no processor time; try again later",
            RETRY_AFTER_S,
        )

    @property
    def ready_pid(self) -> int | None:
        """Of the free child that large questions do not get."""
        with self._lock:
            return self._ready.pid if self._ready is not None and self._ready in self._free else None

    def make_ready(self) -> None:
        """Have a child that large questions do not get: start one, unless one is free. Does not wait for those that are asked."""
        with self._lock:
            if not self._free or self._ready is not None:
                return
            child = self._free.pop()
        try:
            with suppress(ExecutionError, _ChildKilledError):  # the next question meets it, too
                child = self._fresh(child)
                self._ready = child
        finally:
            self._give_back(child)

    def close(self) -> None:
        """End the children. What is being asked fails with ExecutionError."""
        with self._lock:
            self._closed = True
            living = list(self._living)
        for child in living:
            self._end(child)

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [child.pid for child in self._living]

    def _take(self, is_large: bool) -> ChildProcess[A] | None:
        """A free child; or None, one to be started, at once if nobody is asked, else when none has become free for `start_after_s`."""
        with self._returned:
            free, all_ = self._free, self._num_children

            def best() -> int:
                """The one to take, -1 = none: that which is kept ready, for small questions alone, or the one that was used last."""
                if not is_large and self._ready is not None and self._ready in free:
                    return free.index(self._ready)
                return max(
                    (at for at, child in enumerate(free) if child is None or child is not self._ready), default=-1
                )

            self._returned.wait_for(lambda: best() >= 0 and (free[best()] or len(free) == all_), self._start_after_s)
            self._returned.wait_for(lambda: best() >= 0)
            child = free.pop(best())
            if is_large and free and self._ready is None:
                threading.Thread(target=self.make_ready, name="ready", daemon=True).start()
            return child

    def _give_back(self, child: ChildProcess[A] | None) -> None:
        with self._returned:
            if child in self._living:
                self._free.append(child)
            else:
                self._free.insert(0, None)
            self._returned.notify_all()

    def _fresh(self, child: ChildProcess[A] | None) -> ChildProcess[A]:
        """The child, or a new one if there is none or somebody else ended it."""
        if self._closed:
            raise stopping()
        if child is not None:
            if not child.has_ended:
                return child
            self._end(child)
        child = ChildProcess(self._purpose, self._program, self._setup, self._answers)
        with self._lock:
            self._living.add(child)
            closed = self._closed
        if closed:
            self._end(child)
            raise stopping()
        return child

    def _ask(self, child: ChildProcess[A], question: msgspec.Struct) -> A:
        """Raises as `ask` does, or _ChildKilledError: the one place where it is judged why a child was lost."""
        lost: Exception | None = None
        try:
            return child.ask(question, self._limit_s)
        except ChildLateError as error:
            lost = error
        except TimeoutError:
            lost = _ChildKilledError(f"gave no answer within {PATIENCE * self._limit_s:g} s, for want of a processor")
        except EOFError:
            pass
        code = self._end(child)
        if self._closed:
            raise stopping()
        if lost is None:
            lost = (_ChildKilledError if _was_killed(code) else ChildLostError)(f"has ended ({_name(code)})")
        raise lost

    def _end(self, child: ChildProcess[A]) -> int:
        code = child.end()
        with self._lock:
            self._living.discard(child)
            if self._ready is child:
                self._ready = None
        return code


def stopping() -> ExecutionError:
    return ExecutionError("the server is stopping")


def _was_killed(code: int) -> bool:
    """Whether a process ended by a signal that is not its own doing. code: as `Popen.returncode`."""
    return code < 0 and -code not in _CRASHES


def _name(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Those of `own` that a child gets: nothing that may be a secret. Its libraries use one thread."""
    return {name: value for name, value in own.items() if name in _ENVIRONMENT} | _SINGLE_THREADED
