"""The tokens of a model as bytes, and the library's tokenizer made of them.

Owns `Vocabulary`, which is sent to the processes that try grammars, `library_tokenizer`, and the limits of the
library's work. Does not know the tokenizer of the text room:
it takes a `TokenSource`. Runs in the scheduler's process and in its compile children.

A grammar describes the bytes of the output as the client sees them: the concatenation of its tokens' bytes. This holds for the first token
too, whose leading space is shown, because the output continues the prompt. (Tokens after a prompt of special tokens only are the exception:
a tokenizer with `strips_first_space` then hides one leading space that a grammar explicitly began with.)
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, Self

import msgspec
import numpy as np
from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

from headrace.errors import ConfigError
from headrace.messages.grammar import MaskWords

Tokenize = Callable[[str], Sequence[int]]
"""The model's own token ids of a text, without bos and with special tokens' texts read as ordinary characters."""

MARK = 0xFF
"""Begins the bytes by which the library knows special tokens. No UTF-8 text contains it."""

_MEASURED_SIZE = 50_000
"""The vocabulary size that the limits of one mask are measured for. The work of a mask grows with the vocabulary's trie."""


class TokenSource(Protocol):
    """What a `Vocabulary` is made of; `headrace.text.tokenizers.Tokenizer` implements it."""

    fixed_bytes: bool
    vocab_size: int
    special_ids: frozenset[int]

    def vocabulary_bytes(self) -> list[bytes]:
        """The bytes of each token below `vocab_size`; only if `fixed_bytes`."""
        ...


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of one model.

    tokens: bytes of each id below V, the number of logits. Ids without bytes never come next: those that only pad the logits, and those that
    no UTF-8 text contains. special_ids: tokens that are not text, the eos among them. eos_ids: what ends an output, at least one.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]

    @classmethod
    def of(cls, tokenizer: TokenSource, vocab_size: int, eos_ids: Collection[int]) -> Self:
        """The vocabulary of a tokenizer. vocab_size: V, which may exceed the tokenizer's or be below it.

        Raises ConfigError if the bytes of a token depend on its place in the text, or if nothing ends an output.
        """
        if not tokenizer.fixed_bytes:
            raise ConfigError(
                "this model's tokenizer has no fixed bytes per token, so its output cannot follow a grammar"
            )
        eos = sorted({index for index in eos_ids if 0 <= index < vocab_size})
        if not eos:
            raise ConfigError("this model has no end-of-sequence token, so its output cannot follow a grammar")
        tokens = tokenizer.vocabulary_bytes()[:vocab_size]
        special = sorted({index for index in tokenizer.special_ids if index < vocab_size}.union(eos))
        # The tokenizer's ids end below `vocab_size`, or the eos above them has no text.
        tokens += [b""] * (vocab_size - len(tokens))
        return cls([b"" if MARK in token else token for token in tokens], special, eos)

    @property
    def size(self) -> int:
        return len(self.tokens)

    def special_texts(self) -> dict[str, int]:
        """Text -> id of the special tokens that have a text, those that end an output excepted: an end is not part of it."""
        ids = set(self.special_ids).difference(self.eos_ids)
        return {self.tokens[index].decode(errors="replace"): index for index in sorted(ids) if self.tokens[index]}

    def possible(self, with_eos: bool) -> MaskWords:
        """int32[ceil(V / 32)]: the tokens that any grammar may allow. with_eos: the eos among them, or none of them."""
        bits = np.zeros(-(-self.size // 32) * 32, np.bool_)
        bits[: self.size] = [bool(token) for token in self.tokens]
        bits[self.eos_ids] = with_eos
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def library_tokenizer(vocabulary: Vocabulary, tokenize: Tokenize | None = None) -> LLTokenizer:
    """The library's tokenizer; takes 4 us a token, during which no other thread runs.

    tokenize: how the model itself would write a text. Where only one text can follow, a mask allows just the first token of that. Without it,
    the longest token that fits: still the right text, in tokens that the model may not be used to.
    """
    wrapper = _Wrapper(vocabulary, tokenize)
    tokenizer = LLTokenizer(wrapper, n_vocab=vocabulary.size, eos_token=vocabulary.eos_ids)
    wrapper.tokens = ()  # the library has its own copy
    return tokenizer


class _Wrapper(TokenizerWrapper):
    """A tokenizer as the library takes it. Called with the text that must come next, from any thread."""

    def __init__(self, vocabulary: Vocabulary, tokenize: Tokenize | None) -> None:
        self.is_tokenizer_wrapper = True
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        special = set(vocabulary.special_ids)
        self._texts = [b"" if index in special else token for index, token in enumerate(vocabulary.tokens)]
        self._longest = max(map(len, self._texts))
        self._tokenize = tokenize
        self._remembered = functools.lru_cache(maxsize=4096)(self._ids)

    def __call__(self, s: str) -> list[int]:
        # Only the first token after the last one counts, and the library sets aside two tokens' lengths at the end. It asks again for every
        # token, so encoding all of a long text would take time in the square of its length.
        return self._remembered(s[: max(64, 4 * self._longest)])

    def _ids(self, text: str) -> list[int]:
        wanted = text.encode()
        # A sentencepiece tokenizer begins a text with a space. After a newline it does not.
        for before in ("", "\n"):
            ids = self._tail(before + text, wanted)
            if ids is not None:
                return ids
        return self._greedy(wanted)

    def _tail(self, text: str, wanted: bytes) -> list[int] | None:
        """The last of the model's tokens of a text, which make up just `wanted`; None if no token begins where `wanted` does."""
        if self._tokenize is None:
            return None
        ids = list(self._tokenize(text))
        if max(ids, default=0) >= len(self._texts):
            return None  # a token that has no logit
        rest = [self._texts[index] for index in ids]
        surplus = sum(map(len, rest)) - len(wanted)
        start = 0
        while surplus > 0:
            surplus -= len(rest[start])
            start += 1
        return ids[start:] if b"".join(rest[start:]) == wanted else None

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token that fits, again and again."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            length = next((n for n in range(self._longest, 0, -1) if text[at : at + n] in self._by_bytes), 0)
            if not length:
                break
            ids.append(self._by_bytes[text[at : at + length]])
            at += length
        return ids

    @functools.cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {token: index for index, token in reversed(list(enumerate(self._texts))) if token}


def parser_limits(vocab_size: int) -> LLParserLimits:
    """How much work the library may spend on one grammar, wherever a matcher is built, so that what a child passes passes in the worker.

    step_lexer_fuel: at most some 30 ms a mask at the library's 14,000 a millisecond, some 200 ms for the worst regular expressions seen. It is
    renewed by every mask and by nothing else: whoever consumes many tokens without computing masks, as after a retraction, runs out of it.
    step_max_items: at most some 5 ms a mask (20,000 a millisecond) for each 50,000 tokens of the vocabulary; an ordinary schema needs more than
    the library's own 50,000 where V = 262,144. max_lexer_states: 1 to 2 kB each, so at most some 100 MB.
    Errors do not hold the grammar and the output: they go to clients and to the log.
    """
    scale = -(-vocab_size // _MEASURED_SIZE)
    return LLParserLimits(
        step_lexer_fuel=400_000,
        step_max_items=100_000 * scale,
        max_lexer_states=50_000,
        verbose_errors=False,
    )
