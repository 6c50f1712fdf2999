"""Requests whose grammar is being compiled. They do not wait in the queue of those that could run, so others pass them.

Does not own compiling (`Grammars`) nor the waiting queue. Called by the scheduler's thread.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Final

from headrace.errors import ExecutionError, HeadraceError, RequestError
from headrace.log import get_logger
from headrace.messages.grammar import CompiledGrammar, Grammars, GrammarSpec, GrammarStats
from headrace.messages.namespaces import owner_of
from headrace.scheduler.request import Req

logger = get_logger(__name__)


class GrammarQueue:
    """See the module docstring. Iterates over the requests in order of arrival; those that have ended meanwhile are left out."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._pending: list[tuple[Req, Future[CompiledGrammar]]] = []

    def __iter__(self) -> Iterator[Req]:
        return (req for req, _ in self._pending if req.finish is None)

    def __len__(self) -> int:
        return sum(req.finish is None for req, _ in self._pending)

    def add(self, req: Req) -> None:
        assert req.task.grammar is not None, req.rid
        asked = req.asked
        of_key = owner_of(asked.namespace) is not None
        self._pending.append((req, self._grammars.compile(req.task.grammar, asked.tenant, asked.weight, of_key)))

    def take_done(self, now_s: float) -> list[tuple[Req, HeadraceError | None]]:
        """Remove the requests whose grammar is compiled, in order of arrival, and enter it in them; or with the error that ends them. Those that have
        ended meanwhile do not wait any more."""
        if not self._pending:
            return []
        done: list[tuple[Req, Future[CompiledGrammar]]] = []
        pending: list[tuple[Req, Future[CompiledGrammar]]] = []
        for req, future in self._pending:
            if req.finish is not None:
                future.cancel()
            else:
                (done if future.done() else pending).append((req, future))
        self._pending = pending
        return [(req, _enter(req, future, now_s)) for req, future in done]

    def stats(self) -> GrammarStats:
        return self._grammars.stats()

    def close(self) -> None:
        self._grammars.close()


class _NoGrammars:
    def compile(
        self, spec: GrammarSpec, tenant: str = "", weight: float = 1.0, is_private: bool = False
    ) -> Future[CompiledGrammar]:
        refused: Future[CompiledGrammar] = Future()
        refused.set_exception(RequestError(f"{spec.field}: this server does not constrain outputs", spec.field))
        return refused

    def stats(self) -> GrammarStats:
        return GrammarStats()

    def close(self) -> None:
        pass


NO_GRAMMARS: Final = _NoGrammars()
"""For a scheduler whose model has no tokenizer."""


def _enter(req: Req, future: Future[CompiledGrammar], now_s: float) -> HeadraceError | None:
    """Give the request its compiled grammar, or return why there is none."""
    try:
        req.grammar = future.result()
        req.note("grammar_compiled", now_s, 0)
    except RequestError as error:
        field = error.param or ""
        return error if error.message.startswith(field) else RequestError(f"{field}: {error.message}", field)
    except HeadraceError as error:
        return error
    except Exception:  # ends only this request
        logger.exception("the grammar of %r could not be compiled", req.rid)
        return ExecutionError("the grammar could not be compiled: internal error")
    return None
