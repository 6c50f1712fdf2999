"""Child processes that try grammars, with limits of time and memory.

Owns what is said of a grammar that ends its child. Does not own the children (`child_pool`), and keeps no results (`compiler` does). Called from
several threads of the scheduler's process; a call holds one child for as long as it takes.
"""

import sys
from collections.abc import Sequence

from headrace.child_pool.child_side import MIB
from headrace.child_pool.pool import ChildLateError, ChildLostError, ChildPool
from headrace.grammar.compile_child import VERDICTS, Refused, Setup, Verdict
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages.grammar import GrammarSpec

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
        """Whether a grammar can be served. Waits for a free child. Raises ExecutionError if it could not be tried."""
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
