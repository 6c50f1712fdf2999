"""Grammars that constrain what a request may generate: as requested, and as the scheduler and the sampler see them once compiled.

Only `headrace.grammar` knows the library that compiles and matches. The scheduler waits for `Grammars.compile`, gives the result to the worker in
`NewSequence`, and the sampler asks its `TokenMask` which tokens may come next.
"""

from concurrent.futures import Future
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

GrammarKind = Literal["json_schema", "regex", "ebnf", "lark", "choice", "structural_tag"]

MaskWords = npt.NDArray[np.int32]
"""int32[ceil(V / 32)]: bit i % 32 of word i // 32 says whether token i may come next."""


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the output of a request must match.

    text: a JSON schema as JSON; a regular expression; GBNF (`ebnf`); lark; a JSON list of strings (`choice`); a structural tag as JSON, in either
    shape. field: the request's field that asked for it, for messages. after_id: the grammar begins after the first output of this token, the end of
    the model's thoughts; before it everything but an end is allowed. -1 = it begins at once.
    """

    kind: GrammarKind
    text: str
    field: str
    after_id: int = -1


class GrammarStats(msgspec.Struct, frozen=True, gc=False):
    """What has become of grammars since the start.

    num_compiled: grammars compiled, each once for all requests that wait for it. num_cache_hits: requests whose grammar was known, or was being
    compiled for another one. num_refused: grammars refused; a refusal that is remembered counts once. num_killed: children that were lost at their
    work, because of the grammar or killed from outside. num_cached, cached_bytes: what is remembered now, refusals included.
    """

    num_compiled: int = 0
    num_cache_hits: int = 0
    num_refused: int = 0
    num_killed: int = 0
    num_cached: int = 0
    cached_bytes: int = 0


class TokenMask(Protocol):
    """Follows the output of one sequence and says which tokens may come next. Used by one thread at a time."""

    def fill(self, words: MaskWords) -> None:
        """Set `words` to the tokens that may come next. Raises ExecutionError, and from then on always, if the grammar cannot go on."""

    def demanded(self) -> list[int]:
        """Tokens that spell the text that must come next, as far as it is known; empty if there is a choice. Other tokens may spell it, too."""

    def accept(self, token_id: int) -> None:
        """The next token. Raises ExecutionError for one that may not come next."""

    def rollback(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may come next."""


class CompiledGrammar(Protocol):
    """A compiled grammar, shared by all sequences that asked for it."""

    def start(self) -> TokenMask:
        """A mask at the beginning of an output."""


class Grammars(Protocol):
    """Compiles grammars beside the scheduler's loop."""

    def compile(
        self, spec: GrammarSpec, tenant: str = "", weight: float = 1.0, is_private: bool = False
    ) -> "Future[CompiledGrammar]":
        """Begin to compile; returns at once. The result raises RequestError for a grammar that is refused, with the reason, and ExecutionError or
        CapacityError if it could not be tried. Who cancels it does not want it any more. tenant, weight: whose turn it takes, see
        `TokenizedGenerateReqInput`. is_private: no other tenant may learn by the time that this one has compiled it."""

    def stats(self) -> GrammarStats:
        """Counts since the start. Never waits for a grammar."""

    def close(self) -> None:
        """Stop. What is still being compiled is abandoned."""
