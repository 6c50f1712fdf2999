"""A sequence's `TokenMask` over the library's matcher, and the `CompiledGrammar` that they are copied from.

Owns what the library does not do as the sampler needs it: the end of an output is kept here, because the library forgets it in a rollback; a
refused token leaves the matcher as it was; ids that stand for nothing are never allowed. No logging: errors hold words of the request.
"""

import functools
import threading
import time
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from headrace.errors import ExecutionError
from headrace.grammar.vocabulary import Tokenize, Vocabulary, library_tokenizer, parser_limits
from headrace.messages.grammar import MaskWords

SLOW_S = 0.0005
"""A matcher that takes longer for one token is slow."""

_MAX_SINCE_MASK = 16
"""Tokens accepted without a mask between them, as when an output is followed again from its beginning. What the library may spend on them is
limited, and a mask renews it."""

_MAX_REASON = 200
"""Characters of the library's own words in a message."""


class LibraryError(ExecutionError):
    """The library cannot go on with a grammar. words: its own, for `source.explain`; "" if nothing may come next."""

    def __init__(self, message: str, words: str) -> None:
        super().__init__(message)
        self.words = words


class MatcherTokens:
    """The vocabulary as matchers need it: made once, shared by all."""

    def __init__(self, vocabulary: Vocabulary, tokenize: Tokenize | None = None) -> None:
        self.size = vocabulary.size
        self.eos_ids = frozenset(vocabulary.eos_ids)
        self.special_texts = vocabulary.special_texts()
        self.library: LLTokenizer = library_tokenizer(vocabulary, tokenize)
        self.limits = parser_limits(vocabulary.size)
        self.possible = vocabulary.possible(with_eos=True)
        self.possible_before_end = vocabulary.possible(with_eos=False)
        self.eos_words = self.possible & ~self.possible_before_end

    @functools.cached_property
    def executor(self) -> LLExecutor:
        """A thread of the library, for matchers that have become slow."""
        return LLExecutor(1)

    def empty_mask(self) -> MaskWords:
        return np.zeros_like(self.possible)


@dataclass(slots=True)
class Lexer:
    """What the matchers of one grammar share in the library. error: the words with which it has reached its limits; it takes no more text, then."""

    error: str = ""


class Matcher:
    """Follows one sequence. See `TokenMask`. Not safe for use by several threads at once, but free of the thread that made it."""

    def __init__(self, tokens: MatcherTokens, library: LLMatcher, lexer: Lexer) -> None:
        self._tokens = tokens
        self._library = library
        self._lexer = lexer
        # Tokens that the library was told of; the eos that came after them. Together they are the output.
        self._num_told = 0
        self._num_eos = 0
        # While a token takes long, as in a very ambiguous grammar, it is accepted where other threads can run meanwhile.
        self._is_slow = False
        self._partner: LLMatcher | None = None
        self._num_since_mask = 0
        # Where masks were put last, and its address, which takes longer to find out than an ordinary mask has left to do.
        self._words: MaskWords | None = None
        self._address = 0

    def fill(self, words: MaskWords) -> None:
        """Set `words` to the tokens that may come next: int32[ceil(V / 32)], contiguous. Lets other threads run meanwhile.

        The eos are among them only if the output so far is whole. Raises ExecutionError, and from then on always, if the grammar cannot go on.
        """
        assert words.dtype == np.int32, words.dtype
        assert words.flags.c_contiguous, words.flags
        if self._num_eos:
            words[:] = self._tokens.eos_words
            return
        self._num_since_mask = 0
        if words is not self._words:
            self._words, self._address = words, words.ctypes.data
        begin_s = time.perf_counter()
        self._library.unsafe_compute_mask_ptr(self._address, words.nbytes)
        self._is_slow = time.perf_counter() - begin_s > SLOW_S
        self._check()
        whole = self._library.is_accepting()
        np.bitwise_and(words, self._tokens.possible if whole else self._tokens.possible_before_end, out=words)
        if not np.count_nonzero(words):
            raise LibraryError(f"the grammar allows no text of this model after {self._num_told} tokens", "")

    def demanded(self) -> list[int]:
        if self._num_eos or self._is_slow or self._library.is_stopped():
            return []
        return list(self._library.compute_ff_tokens())

    def accept(self, token_id: int) -> None:
        """The next token. Raises ExecutionError for one that may not come next; it is as if it had not been accepted, then, unless the
        grammar has become slow: then it cannot go on.
        """
        if token_id in self._tokens.eos_ids and (self._num_eos or self._library.is_accepting()):
            self._num_eos += 1
            return
        is_text = 0 <= token_id < self._tokens.size and token_id not in self._tokens.eos_ids
        if self._num_eos or not is_text or not self._consume(token_id):
            self._check()
            raise ExecutionError(f"token {token_id} does not follow the grammar after {self._num_told} tokens")
        self._num_told += 1

    def rollback(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` accepted tokens. Raises ExecutionError if the grammar could not go on before."""
        self._check()
        told = max(num_tokens - self._num_eos, 0)
        assert told <= self._num_told, (num_tokens, self._num_told, self._num_eos)
        if told:
            self._library.rollback(told)
            self._check()
        self._num_eos = max(self._num_eos - num_tokens, 0)
        self._num_told -= told

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may come next, or it has come."""
        return bool(self._num_eos) or (self._library.is_stopped() and not self._library.is_error())

    def _consume(self, token_id: int) -> bool:
        if self._num_since_mask == _MAX_SINCE_MASK:
            self.fill(self._tokens.empty_mask())
        self._num_since_mask += 1
        if not self._is_slow:
            begin_s = time.perf_counter()
            taken = self._library.try_consume_tokens([token_id])
            self._is_slow = time.perf_counter() - begin_s > SLOW_S
            return bool(taken)
        # The library keeps the GIL for a single matcher, and releases it for two. A matcher in error does nothing.
        if self._partner is None:
            self._partner = LLMatcher(self._tokens.library, "", log_level=0)
        return self._tokens.executor.consume_token_par([(self._library, token_id), (self._partner, token_id)])[0]

    def _check(self) -> None:
        """Raises LibraryError if the grammar cannot go on.

        A lexer that has reached its limits refuses what should follow, to all that share it, and says so only once.
        """
        words = self._library.get_error() if self._library.is_error() else self._lexer.error
        if words:
            if words.startswith("lexer error"):
                self._lexer.error = words
            raise LibraryError(f"the grammar cannot be followed after {self._num_told} tokens: {_reason(words)}", words)


class Template:
    """A compiled grammar, shared by all sequences that asked for it. It is never advanced itself."""

    def __init__(self, tokens: MatcherTokens, text: str) -> None:
        """Compile `text` (`source.library_text`) and compute its first mask, so that every copy starts with what the mask has worked out.

        Lets other threads run meanwhile. Raises LibraryError if it does not compile or allows nothing.
        """
        self._tokens = tokens
        self._library = LLMatcher(tokens.library, text, log_level=0, limits=tokens.limits)
        # A copy is made under a lock: the library does not say that copies may be made at the same time.
        self._lock = threading.Lock()
        self._lexer = Lexer()
        Matcher(tokens, self._library, self._lexer).fill(tokens.empty_mask())

    @property
    def is_spent(self) -> bool:
        """Whether an output has taken it to the limits of the library: it is of no use any more, and has to be compiled again."""
        return bool(self._lexer.error)

    def start(self) -> Matcher:
        """A matcher at the beginning of an output. From any thread."""
        with self._lock:
            return Matcher(self._tokens, self._library.deep_copy(), self._lexer)


def _reason(library_error: str) -> str:
    """The first line of the library's words. The rest is for its developers."""
    first = library_error.partition("\n")[0].strip()
    if first.startswith("NoExtension"):
        return "it allows nothing to come next"
    return first[:_MAX_REASON]
