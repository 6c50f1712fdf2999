"""Tokens with an index of their n-grams, which says where each was last followed by a token."""

from array import array
from collections.abc import Iterable

import numpy as np

LONGEST, SHORTEST = 4, 2
"""Lengths of the n-grams that are looked up, the longest first: what follows one token is guessed wrong too often to pay."""

MOST_INDEXED = 16384
"""A sequence is indexed from so many tokens before its end on, to twice as many: half a kilobyte of memory each, and a microsecond."""
BYTES_PER_TOKEN = 512
"""Of the index of a sequence, about."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Of the hash of an n-gram, a polynomial modulo 2^64 (R. Karp and M. Rabin, 1987). Two n-grams of the same hash give a wrong guess, nothing worse."""
_MODULUS = (1 << 64) - 1


class History:
    """Tokens, and where n-grams of these lengths came last.

    after[n]: hash of an n-gram -> index of the token after its last occurrence but the one at the end.
    """

    def __init__(self, tokens: "array[int]", lengths: Iterable[int] = range(SHORTEST, LONGEST + 1)) -> None:
        self.tokens = tokens
        self.after: dict[int, dict[int, int]] = {}
        values = np.frombuffer(tokens, np.int32).astype(np.uint64) + np.uint64(1)
        for n in lengths:
            count = len(values) - n  # of those that a token follows
            hashes = np.zeros(max(0, count), np.uint64)
            for offset in range(n):
                hashes = hashes * _FACTOR + values[offset : offset + max(0, count)]
            self.after[n] = dict(zip(hashes.tolist(), range(n, n + max(0, count)), strict=True))

    def append(self, token_id: int) -> None:
        """The next token, which follows the n-grams at the end."""
        index = len(self.tokens)
        for n, after in self.after.items():
            if n <= index:
                after[_hash_of(self.tokens[-n:])] = index
        self.tokens.append(token_id)

    def continuation(self, last: "array[int]", most: int, lengths: Iterable[int]) -> list[int]:
        """Up to `most` tokens from where an n-gram at the end of `last` came before. lengths: of n-grams, the first to look for first."""
        for n in lengths:
            begin = self.after[n].get(_hash_of(last[-n:])) if n <= len(last) else None
            if begin is not None:
                return self.tokens[begin : begin + most].tolist()
        return []


def _hash_of(tokens: Iterable[int]) -> int:
    """Of an n-gram, as in `History.after`."""
    value = 0
    for token_id in tokens:
        value = (value * int(_FACTOR) + token_id + 1) & _MODULUS
    return value
