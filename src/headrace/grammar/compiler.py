"""Compiles grammars beside the scheduler's loop: tried in a child first, compiled here if they pass, and remembered.

Owns the threads that do so, what waits for them, and the cache of compiled grammars and refusals, bounded in bytes. Does not know what limits
a child has (`CompilePool`) or what is refused (`source`). `compile` and `stats` are called by the scheduler's thread, and never wait.
"""

import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from headrace.child_pool.child_side import MIB
from headrace.child_pool.pool import ChildLateError, ChildLostError, ChildPool
from headrace.errors import CapacityError, ConfigError, ExecutionError, HeadraceError, RequestError
from headrace.garbage import give_back_free_memory
from headrace.grammar.compile_child import STACK_BYTES, VERDICTS, Refused, Setup, Verdict
from headrace.grammar.matcher import LibraryError, MatcherTokens, Template
from headrace.grammar.source import explain
from headrace.grammar.vocabulary import Tokenize, Vocabulary
from headrace.log import get_logger
from headrace.messages.grammar import CompiledGrammar, GrammarKind, GrammarSpec, GrammarStats

logger = get_logger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for a grammar that is being compiled here."""

CACHE_BYTES = 48 * MIB
"""What remembered grammars may occupy: hundreds of ordinary ones. One that takes more is compiled for each request."""

_TEMPLATE_BYTES = 64 << 10
_TEMPLATE_BYTES_PER_CHARACTER = 32
"""What a compiled grammar occupies at least, whatever the child measured."""

_REFUSAL_BYTES = 1 << 10
_TRIM_BYTES = 16 * MIB
"""When as much is forgotten at once, the memory is given back to the system."""

Key = tuple[GrammarKind, str]
Outcome = Template | Refused | ExecutionError | CapacityError

T = TypeVar("T")


class Begin(Protocol):
    def __call__(self, work: Callable[[], T], /) -> "Future[T]": ...


def _at_once(work: Callable[[], T]) -> "Future[T]":
    done: Future[T] = Future()
    done.set_result(work())
    return done


PROGRAM = (sys.executable, "-m", "headrace.grammar.compile_child")

MAX_LEFT_BYTES = 256 * MIB
"""A child that keeps more than this after a grammar is replaced."""


class CompilePool(ChildPool[Verdict]):
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
        super().__init__(
            "compile grammars",
            program,
            Setup(vocabulary, memory_bytes),
            VERDICTS,
            num_children=num_children,
            limit_s=limit_s,
            max_left_bytes=MAX_LEFT_BYTES,
        )
        self._memory_bytes = memory_bytes

    def try_spec(self, spec: GrammarSpec) -> Verdict:
        """Whether a grammar can be served. Waits for a free child. Raises ExecutionError or CapacityError if it could not be tried."""
        try:
            return self.ask(spec)
        except ChildLateError:
            message = f"the grammar takes longer than {self._limit_s:g} s to compile"
        except ChildLostError:
            message = (
                f"compiling the grammar takes more memory than the limit ({self._memory_bytes // MIB} MiB), "
                "or it is nested too deeply"
            )
        return Refused(f"{message}; use a smaller one")


@dataclass(slots=True)
class _Waiter:
    """A request for a grammar. field: where the request has it. tenant: whose it is."""

    future: "Future[CompiledGrammar]"
    field: str
    tenant: str

    def answer(self, outcome: Outcome) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        match outcome:
            case Template():
                self.future.set_result(outcome)
            case Refused():
                self.future.set_exception(RequestError(outcome.message, self.field))
            case ExecutionError():
                self.future.set_exception(ExecutionError(outcome.message))
            case CapacityError():
                self.future.set_exception(CapacityError(outcome.message, outcome.retry_after_s))


@dataclass(frozen=True, slots=True)
class _Tools:
    """What the first grammar needs and all later ones share."""

    tokens: "Future[MatcherTokens]"
    pool: CompilePool


class GrammarCompiler:
    """See `Grammars`. Children and threads are started when the first grammar comes, and the library's tokenizer is made while a child makes its own:
    5 us a token, half of them while no other thread runs, and 58 MB for 152,000 tokens, which a server without grammars saves.

    make_vocabulary: called once; a ConfigError that it raises refuses every grammar. tokenize: see `library_tokenizer`. begin: begins work in a
    thread, `make_vocabulary` and then the library's tokenizer. cache_bytes: what remembered grammars may occupy. num_children: grammars that are
    compiled at the same time. limit_s, memory_bytes, program: see `CompilePool`.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        tokenize: Tokenize | None = None,
        *,
        begin: Begin | None = None,
        cache_bytes: int = CACHE_BYTES,
        num_children: int = 2,
        limit_s: float = 5.0,
        memory_bytes: int = 1024 * MIB,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._make_vocabulary = make_vocabulary
        self._tokenize = tokenize
        self._begin = begin or _at_once
        self._num_children = num_children
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self._program = program
        self._cache = _Cache(cache_bytes)
        self._lock = threading.Lock()
        self._waiting: dict[Key, list[_Waiter]] = {}
        self._jobs: queue.SimpleQueue[GrammarSpec | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._tools_lock = threading.Lock()
        self._tools: _Tools | ConfigError | None = None
        self._num_compiled = self._num_cache_hits = self._num_refused = 0

    def compile(self, spec: GrammarSpec, tenant: str = "") -> "Future[CompiledGrammar]":
        """Begin to compile; returns at once. A future that is cancelled is forgotten, and disturbs no other request for the same grammar.

        The result raises RequestError for a grammar that is refused, with the field that asked for it, which is remembered for this tenant, and
        ExecutionError or CapacityError if it could not be tried, which is remembered for nobody.
        """
        key = (spec.kind, spec.text)
        waiter = _Waiter(Future(), spec.field, tenant)
        with self._lock:
            known: Outcome | None = self._cache.get(key, tenant)
            if self._closed:
                known = _stopping()
            elif known is not None:
                self._num_cache_hits += 1
            elif key in self._waiting:
                self._num_cache_hits += 1
                self._waiting[key].append(waiter)
            else:
                self._waiting[key] = [waiter]
                self._start_threads()
                self._jobs.put(spec)
        if known is not None:
            waiter.answer(known)
        return waiter.future

    def stats(self) -> GrammarStats:
        with self._lock:
            return GrammarStats(
                num_compiled=self._num_compiled,
                num_cache_hits=self._num_cache_hits,
                num_refused=self._num_refused,
                num_killed=self._tools.pool.num_killed if isinstance(self._tools, _Tools) else 0,
                num_cached=len(self._cache),
                cached_bytes=self._cache.num_bytes,
            )

    @property
    def child_pids(self) -> list[int]:
        tools = self._tools
        return tools.pool.pids if isinstance(tools, _Tools) else []

    def close(self) -> None:
        """End children and threads. What is still being compiled fails with ExecutionError. Idempotent."""
        with self._lock:
            self._closed = True
            waiters = [waiter for waiting in self._waiting.values() for waiter in waiting]
            self._waiting.clear()
            threads, self._threads = self._threads, []
        for waiter in waiters:
            waiter.answer(_stopping())
        for _ in threads:
            self._jobs.put(None)
        with self._tools_lock:
            if isinstance(self._tools, _Tools):
                self._tools.pool.close()
        for thread in threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _start_threads(self) -> None:
        if self._threads:
            return
        before = threading.stack_size(2 * STACK_BYTES)
        for index in range(self._num_children):
            thread = threading.Thread(target=self._run, name=f"grammars-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)
        threading.stack_size(before)

    def _run(self) -> None:
        while (spec := self._jobs.get()) is not None:
            if self._is_wanted(spec):
                self._finish(spec, *self._outcome(spec))

    def _is_wanted(self, spec: GrammarSpec) -> bool:
        """Whether anybody still waits for it; if not, it is forgotten."""
        key = (spec.kind, spec.text)
        with self._lock:
            waiting = self._waiting.get(key, [])
            if all(waiter.future.cancelled() for waiter in waiting):
                self._waiting.pop(key, None)
                return False
        return True

    def _outcome(self, spec: GrammarSpec) -> tuple[Outcome, int]:
        """What becomes of a grammar, and the bytes that remembering it costs."""
        try:
            tools = self._get_tools()
            verdict = tools.pool.try_spec(spec)
            if isinstance(verdict, Refused):
                return verdict, _REFUSAL_BYTES + 4 * len(spec.text)
            template = Template(tools.tokens.result(), verdict.text)
        except ConfigError as error:
            return Refused(error.message), _REFUSAL_BYTES + 4 * len(spec.text)
        except LibraryError as error:
            # A child does not write in the model's own tokens, so its masks are not quite these.
            return Refused(explain(spec, error.words).message), _REFUSAL_BYTES + 4 * len(spec.text)
        except CapacityError as error:
            return error, 0
        except HeadraceError as error:
            logger.error("a grammar could not be tried: %s", error.message)
            return ExecutionError(error.message), 0
        except Exception:
            logger.exception("a grammar could not be compiled")
            return ExecutionError("internal error"), 0
        least = _TEMPLATE_BYTES + _TEMPLATE_BYTES_PER_CHARACTER * len(verdict.text)
        return template, max(verdict.memory_bytes, least)

    def _finish(self, spec: GrammarSpec, outcome: Outcome, num_bytes: int) -> None:
        key = (spec.kind, spec.text)
        forgotten_bytes = 0
        with self._lock:
            waiting = self._waiting.pop(key, [])
            self._num_compiled += isinstance(outcome, Template)
            self._num_refused += isinstance(outcome, Refused)
            match outcome:
                case Template():
                    forgotten_bytes = self._cache.put(key, None, outcome, num_bytes)
                case Refused():
                    for tenant in {waiter.tenant for waiter in waiting}:
                        forgotten_bytes += self._cache.put(key, tenant, outcome, num_bytes)
        for waiter in waiting:
            waiter.answer(outcome)
        if forgotten_bytes >= _TRIM_BYTES:
            give_back_free_memory()

    def _get_tools(self) -> _Tools:
        with self._tools_lock:
            if self._closed:
                raise _stopping()
            if self._tools is None:
                self._tools = self._make_tools()
            if isinstance(self._tools, ConfigError):
                raise ConfigError(self._tools.message)
            return self._tools

    def _make_tools(self) -> _Tools | ConfigError:
        try:
            vocabulary = self._begin(self._make_vocabulary).result()
        except ConfigError as error:
            return error
        pool = CompilePool(vocabulary, self._num_children, self._limit_s, self._memory_bytes, self._program)
        return _Tools(self._begin(partial(MatcherTokens, vocabulary, self._tokenize)), pool)


class _Cache:
    """What is remembered of grammars, the least recently used forgotten first: what was compiled for everybody, refusals by tenant. Not locked."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[Key, str | None], tuple[Template | Refused, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key, tenant: str) -> Template | Refused | None:
        """What a tenant is to know of a grammar, unless it is spent."""
        for whose in (None, tenant):
            if (known := self._entries.get((key, whose))) is None:
                continue
            outcome, num_bytes = known
            if isinstance(outcome, Refused) or not outcome.is_spent:
                self._entries.move_to_end((key, whose))
                return outcome
            del self._entries[key, whose]
            self.num_bytes -= num_bytes
        return None

    def put(self, key: Key, tenant: str | None, outcome: Template | Refused, num_bytes: int) -> int:
        """Remember an outcome, unless it is larger than all that may be remembered. tenant None: for all. Returns the bytes forgotten."""
        if num_bytes > self._max_bytes:
            return num_bytes
        _, old_bytes = self._entries.pop((key, tenant), (None, 0))
        self._entries[key, tenant] = outcome, num_bytes
        self.num_bytes += num_bytes - old_bytes
        forgotten = 0
        while self.num_bytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.num_bytes -= freed
            forgotten += freed
        return forgotten


def _stopping() -> ExecutionError:
    return ExecutionError("the server is stopping")
