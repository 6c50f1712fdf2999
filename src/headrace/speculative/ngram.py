"""Guesses by n-grams: what came after the last tokens the last time that they came (prompt lookup decoding, A. Saxena, 2023).

An index of each sequence says where its n-grams were last followed by a token. It grows with the sequence: a token costs the same time at the first
position and at the hundred-thousandth. Text that a request predicts stands before its prompt, as if it had followed the prompt's last tokens once.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.messages.requests import SampleTask
from headrace.messages.step import NewSequence
from headrace.speculative.base import NOTHING, Drafter, Guess, can_guess
from headrace.speculative.history import BYTES_PER_TOKEN, LONGEST, MOST_INDEXED, SHORTEST, History
from headrace.speculative.pace import FIRST_CHANCE, learnt
from headrace.speculative.shared import SHARED_AT_A_TIME, SharedOutputs

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


def index_bytes(max_seqs: int, context_length: int) -> int:
    """Memory that indices of as many sequences usually take, about; long ones, and those with a prediction, up to twice as much."""
    return max_seqs * min(context_length, MOST_INDEXED) * BYTES_PER_TOKEN


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
        """See `Drafter.extend`."""
        row = self._rows.get(seq)
        if row is None:
            return
        for token_id, guessed in zip(ids, row.guess, strict=False):
            row.chance = learnt(row.chance, token_id == guessed)
            if token_id != guessed:
                break
        for token_id in ids:
            row.history.append(token_id)
        if len(row.history.tokens) >= 2 * MOST_INDEXED:
            row = self._rows[seq] = self._shortened(row)
        row.guess = self._continuation(row)
        if self._outputs is not None and len(row.history.tokens) - row.num_shared >= SHARED_AT_A_TIME:
            self._share(self._outputs, row)

    def guess(self, seq: int) -> Guess:
        """See `Drafter.guess`."""
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
        history, last = row.history, row.history.tokens[-LONGEST:]
        if self._outputs is None:
            return history.continuation(last, self._most, _LONGEST_FIRST)
        return (
            history.continuation(last, self._most, (LONGEST,))
            or self._outputs.continuation(row.namespace, last, self._most)
            or history.continuation(last, self._most, _LONGEST_FIRST[1:])
        )

    def _share(self, outputs: SharedOutputs, row: _Row) -> None:
        """Tell the others what the sequence has said since the last time, after the n-gram before it."""
        tokens = row.history.tokens
        if len(tokens) > row.num_shared:
            outputs.add(row.namespace, tokens[max(0, row.num_shared - LONGEST) :])
            row.num_shared = len(tokens)
