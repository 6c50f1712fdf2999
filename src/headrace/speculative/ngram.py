"""Guesses by n-grams: what came after the last tokens the last time that they came (prompt lookup decoding, A. Saxena, 2023).

An index of each sequence says where its n-grams were last followed by a token. It grows with the sequence: a token costs the same time at the first
position and at the hundred-thousandth. Text that a request predicts stands before its prompt, as if it had followed the prompt's last tokens once.
What sequences have said lately is shared within a namespace: samples of one prompt, and answers to similar questions, often say the same.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.messages.requests import SampleTask
from headrace.messages.step import NewSequence
from headrace.speculative.base import NOTHING, Drafter, Guess, can_guess
from headrace.speculative.pace import FIRST_CHANCE, learnt_from

LONGEST, SHORTEST = 4, 2
"""Lengths of the n-grams that are looked up, the longest first: what follows one token is guessed wrong too often to pay."""

MOST_INDEXED = 16384
"""A sequence is indexed from so many tokens before its end on, to twice as many: half a kilobyte of memory each, and a microsecond."""
BYTES_PER_TOKEN = 512
"""Of the index of a sequence, about."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Of the hash of an n-gram, a polynomial modulo 2^64 (R. Karp and M. Rabin, 1987). Two n-grams of the same hash give a wrong guess, nothing worse."""
_MODULUS = (1 << 64) - 1
_POWERS = tuple(int(_FACTOR) ** power & _MODULUS for power in range(LONGEST))


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
        self._ends = hashes_at_end(tokens)

    def append(self, token_id: int) -> None:
        """The next token, which follows the n-grams at the end."""
        tokens, ends = self.tokens, self._ends
        index = len(tokens)
        for n, after in self.after.items():
            if n <= index:
                after[ends[n]] = index
        tokens.append(token_id)
        self._ends = hashes_at_end(tokens)

    def continuation(self, most: int, lengths: Iterable[int], ends: Sequence[int] | None = None) -> list[int]:
        """Up to `most` tokens from where an n-gram at the end came before. lengths: of n-grams, the first to look for first. ends: of other tokens,
        see `hashes_at_end`."""
        ends = self._ends if ends is None else ends
        for n in lengths:
            begin = self.after[n].get(ends[n])
            if begin is not None:
                return self.tokens[begin : begin + most].tolist()
        return []


def hashes_at_end(tokens: "array[int]") -> tuple[int, ...]:
    """Of the n-grams at the end, as in `History.after`, by n. Where there are fewer tokens, a hash that no n-gram has.

    A worker computes them for each token that it samples, so nothing here is a loop.
    """
    if len(tokens) < LONGEST:
        tokens = array("i", [-1] * (LONGEST - len(tokens))) + tokens
    first, second, third, fourth = tokens[-LONGEST:]
    of_two = ((third + 1) * _POWERS[1] + fourth + 1) & _MODULUS
    of_three = ((second + 1) * _POWERS[2] + of_two) & _MODULUS
    return 0, 0, of_two, of_three, ((first + 1) * _POWERS[3] + of_three) & _MODULUS


SHARED_AT_A_TIME = 32
"""A sequence tells the others when it has said so many tokens more."""


class SharedOutputs:
    """The last `most_tokens` tokens that sequences have told, of the namespaces that were used last. A namespace knows only its own."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._num_tokens = 0
        self._by_namespace: OrderedDict[str, History] = OrderedDict()

    def add(self, namespace: str, tokens: "array[int]") -> None:
        """Tokens that a sequence of this namespace has said, one after the other."""
        history = self._by_namespace.get(namespace)
        if history is None:
            history = self._by_namespace[namespace] = History(array("i"), (LONGEST,))
        self._by_namespace.move_to_end(namespace)
        for token_id in tokens:
            history.append(token_id)
        self._num_tokens += len(tokens)
        while self._num_tokens > self._most_tokens:
            self._forget()

    def continuation(self, namespace: str, last: "array[int]", most: int) -> list[int]:
        """Up to `most` tokens from where the last `LONGEST` of these tokens were said last, in this namespace."""
        history = self._by_namespace.get(namespace)
        return [] if history is None else history.continuation(most, (LONGEST,), hashes_at_end(last))

    def _forget(self) -> None:
        """All of the namespace that was used longest ago, or the older half of the only one."""
        namespace, history = self._by_namespace.popitem(last=False)
        self._num_tokens -= len(history.tokens)
        if not self._by_namespace:
            kept = history.tokens[len(history.tokens) - self._most_tokens // 2 :]
            self._by_namespace[namespace] = History(kept, (LONGEST,))
            self._num_tokens = len(kept)


_LONGEST_FIRST = range(LONGEST, SHORTEST - 1, -1)


@dataclass(slots=True)
class _Row:
    """One sequence. chance: see `pace`. guess: what may follow its last token. namespace: of what others may know of its outputs. num_shared: of its
    tokens, those before this one they know already."""

    history: History
    namespace: str
    num_shared: int
    chance: float = FIRST_CHANCE
    guess: list[int] = field(default_factory=list)


def _row(tokens: "array[int]", namespace: str) -> _Row:
    """Of a sequence with these tokens so far."""
    return _Row(History(tokens), namespace, len(tokens))


class NgramDrafter(Drafter):
    """most: tokens that are guessed at a time. outputs: of all sequences; what came after the last tokens there is guessed, unless as
    many of them came before in the sequence itself."""

    def __init__(self, most: int, outputs: SharedOutputs | None = None) -> None:
        self._most = most
        self._outputs = outputs
        self._rows: dict[int, _Row] = {}

    def add(self, new: NewSequence) -> None:
        """See `Drafter.add`. Embeddings have no tokens to look up, and hidden states are asked for token by token."""
        if not can_guess(new):
            return
        assert isinstance(new.task, SampleTask), "it samples"
        tokens = array("i", new.token_ids.astype(np.int32).tobytes())
        predicted = array("i", new.task.predicted_ids)[:MOST_INDEXED]
        if predicted:
            end = new.num_prompt_tokens
            tokens = tokens[max(0, end - LONGEST) : end] + predicted + tokens[-MOST_INDEXED:]
        self._rows[new.seq] = _row(tokens[-2 * MOST_INDEXED :] if predicted else tokens[-MOST_INDEXED:], new.namespace)

    def extend(self, seq: int, ids: Sequence[int]) -> None:
        row = self._rows.get(seq)
        if row is None:
            return
        if row.guess:
            row.chance = learnt_from(row.chance, ids, row.guess)
        history = row.history
        for token_id in ids:
            history.append(token_id)
        if len(history.tokens) >= 2 * MOST_INDEXED:
            row = self._rows[seq] = self._shortened(row)
        row.guess = self._continuation(row)
        if self._outputs is not None and len(row.history.tokens) - row.num_shared >= SHARED_AT_A_TIME:
            self._share(self._outputs, row)

    def guess(self, seq: int) -> Guess:
        row = self._rows.get(seq)
        return NOTHING if row is None else Guess(row.guess, row.chance)

    def leave(self, seq: int) -> None:
        """See `Drafter.leave`. Its last tokens are told to the others."""
        row = self._rows.pop(seq, None)
        if row is not None and self._outputs is not None:
            self._share(self._outputs, row)

    def _shortened(self, row: _Row) -> _Row:
        """The same with the last `MOST_INDEXED` tokens."""
        if self._outputs is not None:
            self._share(self._outputs, row)
        shortened = _row(row.history.tokens[-MOST_INDEXED:], row.namespace)
        shortened.chance = row.chance
        return shortened

    def _continuation(self, row: _Row) -> list[int]:
        history = row.history
        if self._outputs is None:
            return history.continuation(self._most, _LONGEST_FIRST)
        return (
            history.continuation(self._most, (LONGEST,))
            or self._outputs.continuation(row.namespace, history.tokens[-LONGEST:], self._most)
            or history.continuation(self._most, _LONGEST_FIRST[1:])
        )

    def _share(self, outputs: SharedOutputs, row: _Row) -> None:
        """Tell the others what the sequence has said since the last time, after the n-gram before it."""
        tokens = row.history.tokens
        if len(tokens) > row.num_shared:
            outputs.add(row.namespace, tokens[max(0, row.num_shared - LONGEST) :])
            row.num_shared = len(tokens)
