"""Compiles grammars beside the scheduler's loop: tried in a child first, compiled here if they pass, and remembered.

Owns the threads that do so, in which tenants take turns (`headrace.turns`), and the cache of compiled grammars and refusals, bounded in bytes. Does
not know what limits a child has (`CompilePool`) or what is refused (`source`). `compile` and `stats` are called by the scheduler's thread, and never
wait.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from headrace.child_pool.child_side import MIB
from headrace.child_pool.pool import (
    MAX_LEFT_BYTES,
    WAIT_LIMIT_S,
    ChildLateError,
    ChildLostError,
    ChildPool,
    stopping,
    worked_s,
)
from headrace.errors import CapacityError, ConfigError, ExecutionError, HeadraceError, RequestError
from headrace.garbage import give_back_free_memory
from headrace.grammar.compile_child import STACK_BYTES, VERDICTS, Refused, Setup, Verdict
from headrace.grammar.matcher import LibraryError, MatcherTokens, Template
from headrace.grammar.source import explain
from headrace.grammar.vocabulary import Tokenize, Vocabulary
from headrace.log import get_logger
from headrace.messages.grammar import CompiledGrammar, GrammarKind, GrammarSpec, GrammarStats
from headrace.turns import Asked, Kept, Turns, is_large

logger = get_logger(__name__)

NUM_CHILDREN = 3
"""Two of one tenant work at the same time."""

SECONDS_PER_CHARACTER = 1e-5

SHARED_CHARACTERS = 64
"""A grammar of at most so many is compiled once for all tenants, such as that of any JSON object: it tells nothing of who asked for it."""

CACHE_BYTES = 48 * MIB
"""What remembered grammars of all tenants may occupy: hundreds of ordinary ones. One that takes more is compiled for each request."""

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


class CompilePool(ChildPool[Verdict]):
    """Tries grammars in children.

    limit_s: processor time for one grammar. memory_bytes: memory for one, beyond the child's own. program: the command that a child runs.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        num_children: int = NUM_CHILDREN,
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
            return self.ask(spec, is_large())
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
    """A request for a grammar. field: where the request has it."""

    future: "Future[CompiledGrammar]"
    field: str

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


@dataclass(slots=True)
class _Waiting:
    """The requests of a tenant for a grammar, and the work for them."""

    work: "Future[tuple[Outcome, int | None]]"
    waiters: list[_Waiter]


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
    compiled at the same time, all but one of one tenant. limit_s, memory_bytes, program: see `CompilePool`.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        tokenize: Tokenize | None = None,
        *,
        begin: Begin | None = None,
        cache_bytes: int = CACHE_BYTES,
        num_children: int = NUM_CHILDREN,
        limit_s: float = 5.0,
        memory_bytes: int = 1024 * MIB,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._make_vocabulary = make_vocabulary
        self._tokenize = tokenize
        self._begin = begin or _at_once
        self._num_children = num_children
        self._turns = Turns(
            num_children,
            "grammars",
            seconds_per_byte=SECONDS_PER_CHARACTER,
            wait_limit_s=WAIT_LIMIT_S,
            clock=worked_s,
            leaves_one=True,
            stack_bytes=2 * STACK_BYTES,
        )
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self._program = program
        self._cache: Kept[tuple[Key, str | None], Template | Refused] = Kept(cache_bytes)
        self._lock = threading.Lock()
        self._waiting: dict[tuple[Key, str], _Waiting] = {}
        self._closed = False
        self._tools_lock = threading.Lock()
        self._tools: _Tools | ConfigError | None = None
        self._num_compiled = self._num_cache_hits = self._num_refused = 0

    def compile(
        self, spec: GrammarSpec, tenant: str = "", weight: float = 1.0, is_private: bool = False
    ) -> "Future[CompiledGrammar]":
        """Begin to compile; returns at once. A future that is cancelled is forgotten, and disturbs no other request for the same grammar.

        The result raises RequestError for a grammar that is refused, with the field that asked for it, which is remembered for this tenant;
        CapacityError if it waited too long; and ExecutionError or CapacityError if it could not be tried: these are remembered for nobody.
        """
        key = (spec.kind, spec.text)
        waiter = _Waiter(Future(), spec.field)
        owner = tenant if is_private and len(spec.text) > SHARED_CHARACTERS else None
        with self._lock:
            known: Outcome | None = self._known(key, owner, tenant)
            if self._closed:
                known = stopping()
            elif known is not None:
                self._num_cache_hits += 1
            elif (waiting := self._waiting.get((key, tenant))) is not None:
                self._num_cache_hits += 1
                waiting.waiters.append(waiter)
            else:
                work = self._turns.submit(
                    lambda: self._outcome(spec, owner, tenant), Asked(tenant, weight), len(spec.text)
                )
                self._waiting[key, tenant] = _Waiting(work, [waiter])
        if known is not None:
            waiter.answer(known)
            return waiter.future
        waiter.future.add_done_callback(lambda future: self._give_up(key, tenant) if future.cancelled() else None)
        if waiting is None:
            work.add_done_callback(lambda work: self._finish(spec, owner, tenant, work))
        return waiter.future

    def stats(self) -> GrammarStats:
        with self._lock:
            return GrammarStats(
                num_compiled=self._num_compiled,
                num_cache_hits=self._num_cache_hits,
                num_refused=self._num_refused,
                num_killed=self._tools.pool.num_killed if isinstance(self._tools, _Tools) else 0,
                num_cached=len(self._cache),
                cached_bytes=self._cache.size,
            )

    @property
    def child_pids(self) -> list[int]:
        tools = self._tools
        return tools.pool.pids if isinstance(tools, _Tools) else []

    def close(self) -> None:
        """End children and threads. What is still being compiled fails with ExecutionError. Idempotent."""
        with self._lock:
            self._closed = True
            waiters = [waiter for waiting in self._waiting.values() for waiter in waiting.waiters]
            self._waiting.clear()
        for waiter in waiters:
            waiter.answer(stopping())
        self._turns.close()
        with self._tools_lock:
            if isinstance(self._tools, _Tools):
                self._tools.pool.close()

    def _give_up(self, key: Key, tenant: str) -> None:
        """A request does not want its grammar any more: unless others do, or it is being compiled, it is forgotten."""
        with self._lock:
            waiting = self._waiting.get((key, tenant))
            if (
                waiting is not None
                and all(waiter.future.cancelled() for waiter in waiting.waiters)
                and waiting.work.cancel()
            ):
                del self._waiting[key, tenant]

    def _outcome(self, spec: GrammarSpec, owner: str | None, tenant: str) -> tuple[Outcome, int | None]:
        """What becomes of a grammar, and the bytes that remembering it costs; None: it is remembered already."""
        with self._lock:
            known = self._known((spec.kind, spec.text), owner, tenant)
        if known is not None:
            return known, None
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

    def _finish(
        self, spec: GrammarSpec, owner: str | None, tenant: str, work: "Future[tuple[Outcome, int | None]]"
    ) -> None:
        if work.cancelled():
            return
        key = (spec.kind, spec.text)
        match work.exception():
            case None:
                outcome, num_bytes = work.result()
            case CapacityError() as late:
                outcome, num_bytes = late, None
            case _:
                outcome, num_bytes = ExecutionError("internal error"), None
        forgotten_bytes = 0
        with self._lock:
            waiting = self._waiting.pop((key, tenant), None)
            match outcome, num_bytes:
                case Template(), int():
                    self._num_compiled += 1
                    payer = tenant if len(spec.text) > SHARED_CHARACTERS else ""
                    forgotten_bytes = self._cache.put((key, owner), outcome, num_bytes, payer)
                case Refused(), int():
                    self._num_refused += 1
                    forgotten_bytes = self._cache.put((key, tenant), outcome, num_bytes, tenant)
        for waiter in waiting.waiters if waiting is not None else ():
            waiter.answer(outcome)
        if forgotten_bytes >= _TRIM_BYTES:
            give_back_free_memory()

    def _known(self, key: Key, owner: str | None, tenant: str) -> Template | Refused | None:
        """What a tenant is to know of a grammar, unless it is spent. owner: whose it is once it is compiled; None = everybody's. Locked."""
        for whose in (owner, tenant):
            known = self._cache.use((key, whose))
            if known is not None and (isinstance(known, Refused) or not known.is_spent):
                return known
            self._cache.drop((key, whose))
        return None

    def _get_tools(self) -> _Tools:
        with self._tools_lock:
            if self._closed:
                raise stopping()
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
