"""The sequences whose output a grammar constrains: what each may sample next, and the threads that find it out while the layers run.

Owns the `TokenMask` of each such sequence, its place in the output, and the time that a mask may take. Does not own the grammars, nor the kernel
that applies masks. Called by the worker's thread, except for `_Row.fill`.

A mask that is not ready when the logits are makes its row sit the step out, never the batch: the row is planned again at the same position, and finds
the mask that was filled meanwhile. So a grammar that is slow, or made to be slow, costs only its own sequence time.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from headrace.errors import ExecutionError
from headrace.log import get_logger
from headrace.messages.grammar import MaskWords, TokenMask
from headrace.messages.requests import SampleTask
from headrace.messages.step import NewSequence
from headrace.sampling.draw import TokenMasks

logger = get_logger(__name__)

PATIENCE_S: Final = 0.002
"""How long a step waits for masks that were begun with it, and once more if another thread takes those that wait behind a slow one."""

PATIENCE_ALONE_S: Final = 0.02
"""How long it waits for any mask if no row is ready: whoever comes meanwhile waits, too."""

LIMIT_S: Final = 0.5
"""A sequence whose mask takes more processor time ends. Not the time that passes: on a busy machine a mask may wait long for its turn."""

WAIT_LIMIT_S: Final = 5.0
"""One whose mask is not there after this much time ends, too."""

MAX_THREADS: Final = 3

TOO_SLOW = f"the grammar takes more than {LIMIT_S:g} seconds to find the tokens that may come next; make it simpler"


class _Row:
    """One sequence.

    num_tokens: its prompt and the outputs so far, so the index of the next one. words: where that one's mask is filled. only_end: the mask allows
    nothing but the end. done: it is filled, or `error` says why it cannot be. busy: a thread fills it or will, since step number `step`. begun_s:
    when it began, infinite before. fill_s: seconds that it took.
    demanded: tokens that spell what must come next, when it was filled; only with notes_demands.
    clock, begun_at_s: the processor clock of the thread that fills it, and what it showed at the beginning.
    """

    def __init__(self, new: NewSequence, vocab_size: int, notes_demands: bool) -> None:
        assert isinstance(new.task, SampleTask), "it has a grammar"
        params = new.task.params
        assert new.grammar is not None, new.rid
        assert params.grammar is not None, new.rid
        self.mask: TokenMask = new.grammar.start()
        self.num_tokens = new.num_prompt_tokens
        self.words: MaskWords = np.zeros(-(-vocab_size // 32), np.int32)
        self.only_end = False
        self.done = False
        self.busy = False
        self.step = 0
        self.clock = 0
        self.begun_at_s = 0.0
        self.begun_s = math.inf
        self.fill_s = 0.0
        self.error = ""
        self.demanded: list[int] = []
        self._notes_demands = notes_demands
        # What `mask` is still to be told: to forget so many tokens, and then these. In its thread, not between two steps.
        self._num_to_forget = 0
        self._unread: list[int] = []
        eos = [i for i in new.end_token_ids if 0 <= i < vocab_size and i not in params.stop_token_ids]
        self._eos = np.array(eos, np.int64)
        self._eos_bits = [(i // 32, int(np.int32(1) << np.int32(i % 32))) for i in eos]
        self._ignores_eos = params.ignore_eos
        self._after_id = params.grammar.after_id
        # Index of the first token that the grammar is about; None = it has not begun.
        self._begins_at = new.num_prompt_tokens if self._after_id < 0 else None
        for token_id in new.token_ids[new.num_prompt_tokens :].tolist():
            self.accept(token_id)

    def accept(self, token_id: int) -> None:
        """The next token. If the grammar does not allow it, the step after it ends the sequence."""
        self.done = False
        self.num_tokens += 1
        if self._begins_at is None:
            if token_id == self._after_id:
                self._begins_at = self.num_tokens
        else:
            self._unread.append(token_id)

    def go_back(self, num_tokens: int) -> None:
        """Forget the tokens from index `num_tokens` on. Not after an error."""
        self.done = False
        if self._begins_at is not None:
            count = self.num_tokens - max(num_tokens, self._begins_at)
            num_read = max(0, count - len(self._unread))
            self._num_to_forget += num_read
            del self._unread[len(self._unread) - (count - num_read) :]
            if num_tokens < self._begins_at:
                self._begins_at = None
        self.num_tokens = num_tokens

    def is_over_limit(self, now_s: float) -> bool:
        """Whether the mask that a thread fills takes too much. now_s: time.monotonic()."""
        if now_s - self.begun_s > WAIT_LIMIT_S:
            return True
        return now_s - self.begun_s > LIMIT_S and time.clock_gettime(self.clock) - self.begun_at_s > LIMIT_S

    def fill(self) -> None:
        """Fill `words`. In a thread of its own, during which nobody else uses the row."""
        self.clock, self.begun_at_s = time.pthread_getcpuclockid(threading.get_ident()), time.thread_time()
        self.begun_s = time.monotonic()
        try:
            if self._num_to_forget:
                self.mask.rollback(self._num_to_forget)
                self._num_to_forget = 0
            for token_id in self._unread:
                self.mask.accept(token_id)
            self._unread.clear()
            self.demanded = []
            if self._begins_at is None:
                self.words.fill(-1)
            else:
                self.mask.fill(self.words)
                if self._notes_demands:
                    self.demanded = self.mask.demanded()
                self.only_end = self.mask.is_complete
            if self._begins_at is None or (self._ignores_eos and not self.only_end):
                allowed = self.words.item
                if any(allowed(word) & bit for word, bit in self._eos_bits):
                    _forbid(self.words, self._eos)
        except ExecutionError as error:
            self.error = error.message
        except Exception:  # an error ends only this sample
            logger.exception("a grammar's mask could not be filled")
            self.error = "the grammar could not be applied"
        self.fill_s = time.monotonic() - self.begun_s


@dataclass(frozen=True, slots=True)
class ReadyMasks:
    """The masks of a step's constrained rows. tokens: what those may draw that are ready, or None; only_end: those of them that may only end.

    late: those that sit the step out. errors: messages with which rows end.
    """

    tokens: TokenMasks | None = None
    only_end: frozenset[int] = frozenset()
    late: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)


NO_MASKS: Final = ReadyMasks()
"""Of a step without constrained rows."""


class GrammarRows:
    """The constrained sequences, by row of the worker's tables; see the module docstring.

    notes_demands: find out with each mask what must come next (`demanded`), of sequences that are added from then on.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.notes_demands = False
        self._rows: dict[int, _Row] = {}
        self._threads = _Threads()
        self._step = 0
        self._spent_s = 0.0
        # The words of a step's rows, kept from step to step.
        self._words = np.empty((0, 0), np.int32)

    def add(self, seq: int, new: NewSequence) -> None:
        """Put `new`, with the outputs that it already has, in row `seq`, replacing the old content; only the latter if it has no grammar."""
        self.discard(seq)
        if new.grammar is not None:
            self._rows[seq] = _Row(new, self._vocab_size, self.notes_demands)

    def discard(self, seq: int) -> None:
        """Forget row `seq`. A mask that is being filled for it is not looked at."""
        row = self._rows.pop(seq, None)
        if row is not None and row.busy:
            self._threads.withdraw(row)

    def __len__(self) -> int:
        return len(self._rows)

    def rows_of(self, seqs: npt.NDArray[np.int32]) -> list[int]:
        """Indices of those of `seqs` that are constrained."""
        if not self._rows:
            return []
        return [i for i, seq in enumerate(seqs.tolist()) if seq in self._rows]

    def begin(self, seqs: Sequence[int], positions: Sequence[int]) -> None:
        """Begin to fill the masks of those of `seqs` that are constrained. positions: index that the next token will have."""
        if not self._rows:
            return
        self._step += 1
        todo: list[_Row] = []
        for seq, position in zip(seqs, positions, strict=True):
            row = self._rows.get(seq)
            if row is None or row.busy or row.error or position > row.num_tokens:
                continue
            if position < row.num_tokens:
                row.go_back(position)
            if not row.done:
                row.busy = True
                row.step = self._step
                row.begun_s = math.inf
                todo.append(row)
        if todo:
            self._threads.submit(todo)

    def ready(
        self, seqs: Sequence[int], positions: Sequence[int], computing: Callable[[], bool] = lambda: False
    ) -> ReadyMasks:
        """The masks of a step's rows, for which `begin` has been called; valid until the next call. Waits for those that are nearly ready.

        computing: whether the step's logits are not there yet, so that waiting costs nobody time.
        """
        get = self._rows.get
        found = [(i, row) for i, seq in enumerate(seqs) if (row := get(seq)) is not None]
        # The step was planned before the one that the row sat out, or whose error ended it, was collected.
        current = [(i, row) for i, row in found if positions[i] <= row.num_tokens]
        late = [i for i, row in found if positions[i] > row.num_tokens]
        if any(row.busy for _, row in current):
            self._wait([row for _, row in current], len(current) == len(seqs), computing)
        now = time.monotonic()
        rows: list[int] = []
        words: list[MaskWords] = []
        only_end: list[int] = []
        errors: dict[int, str] = {}
        for i, row in current:
            if row.busy and row.is_over_limit(now):
                errors[i] = TOO_SLOW
            elif row.busy:
                late.append(i)
            elif row.error:
                errors[i] = row.error
            else:
                rows.append(i)
                words.append(row.words)
                self._spent_s += row.fill_s
                if row.only_end:
                    only_end.append(i)
        if not rows:
            return ReadyMasks(None, frozenset(), late, errors)
        if len(rows) > len(self._words):
            self._words = np.empty((len(rows), len(words[0])), np.int32)
        index = np.full(len(seqs), -1, np.int64)
        index[rows] = np.arange(len(rows))
        ready = TokenMasks(np.stack(words, out=self._words[: len(rows)]), index)
        return ReadyMasks(ready, frozenset(only_end), late, errors)

    def accept(self, seq: int, token_id: int) -> None:
        self._rows[seq].accept(token_id)

    def acceptors(self, seqs: Sequence[int]) -> list[Callable[[int], None]]:
        """`accept` of each of these sequences, for a token that is known later: then the row may be another's, who does not notice."""
        return [self._rows[seq].accept for seq in seqs]

    def demanded(self, seq: int) -> list[int]:
        """Tokens that spell what a sequence's grammar demanded from its last token on; empty if it left a choice there, if there is no grammar,
        and without `notes_demands`."""
        row = self._rows.get(seq)
        return [] if row is None else row.demanded

    def take_masks_s(self) -> float:
        """Seconds that were spent on the masks that have become ready since the last call."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    def close(self) -> None:
        """End the threads, after the masks that they are filling."""
        self._threads.close()

    def _wait(self, rows: Sequence[_Row], alone: bool, computing: Callable[[], bool]) -> None:
        """Wait until the masks of `rows` are filled, but not too long. alone: the step has no other rows."""
        # One that was late before is not waited for again.
        fresh = [row for row in rows if row.busy and row.step == self._step]
        while not self._threads.wait(fresh, all, PATIENCE_S) and computing():
            if any(row.busy and row.begun_s == math.inf for row in rows):
                self._threads.add()
        if any(row.busy and row.begun_s == math.inf for row in rows) and self._threads.add():
            self._threads.wait(fresh, all, PATIENCE_S)
        if alone and all(row.busy for row in rows):
            self._threads.wait(rows, any, PATIENCE_ALONE_S)


class _Threads:
    """Threads that fill masks. Usually there is one: on few cores several would only take turns. Another joins it when masks are late, so that a
    slow one does not delay those behind it."""

    def __init__(self) -> None:
        self._todo: deque[_Row] = deque()
        lock = threading.Lock()
        # There is more to do, or nothing any more; a mask is filled.
        self._work = threading.Condition(lock)
        self._filled = threading.Condition(lock)
        self._num_threads = 0
        self._is_closed = False

    def submit(self, rows: Sequence[_Row]) -> None:
        with self._work:
            self._todo.extend(rows)
            self._work.notify_all()
        if not self._num_threads:
            self.add()

    def withdraw(self, row: _Row) -> None:
        """Do not fill the row's mask, unless a thread has begun to."""
        with self._work, contextlib.suppress(ValueError):
            self._todo.remove(row)

    def wait(self, rows: Sequence[_Row], how_many: Callable[[Iterable[bool]], bool], timeout_s: float) -> bool:
        """Until all, or any, of the rows are not busy. Returns whether they are."""
        with self._filled:
            return self._filled.wait_for(lambda: how_many(not row.busy for row in rows), timeout_s)

    def add(self) -> bool:
        """Let one more fill masks. Returns False if there are enough."""
        if self._num_threads == MAX_THREADS:
            return False
        self._num_threads += 1
        threading.Thread(target=self._run, name="grammar-masks", daemon=True).start()
        return True

    def close(self) -> None:
        """End the threads, after the masks that are begun."""
        with self._work:
            self._is_closed = True
            self._work.notify_all()

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._is_closed or self._todo)
                if self._is_closed:
                    return
                row = self._todo.popleft()
            row.fill()
            with self._filled:
                row.done, row.busy = True, False
                self._filled.notify_all()
            # What a sequence that has left held must not wait here for the next one.
            del row


def _forbid(words: MaskWords, ids: npt.NDArray[np.int64]) -> None:
    """Clear the bits of `ids`, unless no other is set."""
    kept = words[ids // 32]
    np.bitwise_and.at(words, ids // 32, ~(np.int32(1) << (ids % 32).astype(np.int32)))
    if not words.any():
        words[ids // 32] = kept
