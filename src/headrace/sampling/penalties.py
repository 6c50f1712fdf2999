"""Edits of a row of logits before the draw: bias, penalties, the end of reasoning, bad words, allowed ids, the minimum length.

Owns the edits of one sequence (`LogitEdits`) and the tokens that they need (`TokenHistory`); sequences without edits have neither. Edits
touch only the ids concerned, so their cost depends on the tokens used, not on the vocabulary. Worker's thread. Penalties also on a device
(`DevicePenalties`).
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.messages.requests import SampleTask
from headrace.messages.step import NewSequence
from headrace.sampling.params import ResolvedSamplingParams, ThinkingBudget

FORCED = 1e30
"""The logit of a token that is forced: above all others, also after the temperature, but a mask still forbids it."""

_ROWS_AT_ONCE = 32
_BYTES_PER_LOGIT = 48
"""What the edit of one row takes beside it for each id: its counts, logits and losses, some of them twice."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Ints = Sequence[int] | Int32Array


class TokenHistory:
    """A sequence's tokens so far: a growing int32 buffer."""

    def __init__(self, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        self._buffer = np.empty(max(64, 2 * len(token_ids)), dtype=np.int32)
        self._buffer[: len(token_ids)] = token_ids
        self.num_tokens = len(token_ids)
        self.num_prompt_tokens = num_prompt_tokens

    @property
    def prompt(self) -> Int32Array:
        """int32[num_prompt_tokens], read-only."""
        return self._view(0, self.num_prompt_tokens)

    @property
    def outputs(self) -> Int32Array:
        """int32[num_tokens - num_prompt_tokens], read-only."""
        return self._view(self.num_prompt_tokens, self.num_tokens)

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty_like(self._buffer)))
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1

    def truncate(self, num_tokens: int) -> None:
        assert self.num_prompt_tokens <= num_tokens <= self.num_tokens, (num_tokens, self.num_tokens)
        self.num_tokens = num_tokens

    def _view(self, start: int, end: int) -> Int32Array:
        view = self._buffer[start:end]
        view.flags.writeable = False
        return view


class Penalties:
    """Repetition (Keskar et al., "CTRL", 2019), frequency and presence penalties of one sequence.

    The repetition penalty counts prompt and outputs: positive logits are divided by it, others multiplied. The frequency penalty (per
    occurrence) and the presence penalty (once) are subtracted and count only outputs.
    """

    def __init__(self, params: ResolvedSamplingParams, prompt_ids: Int32Array, vocab_size: int) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._in_prompt = (
            _in_vocabulary(np.unique(prompt_ids), vocab_size) if params.repetition_penalty != 1.0 else _NO_IDS
        )
        self._counts: dict[int, int] = {}

    def count(self, token_id: int) -> None:
        if 0 <= token_id < self._vocab_size:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def recount(self, output_ids: Int32Array) -> None:
        self._counts.clear()
        for token_id in output_ids.tolist():
            self.count(token_id)

    def apply(self, row: torch.Tensor) -> None:
        """Edit row float32[V] in place."""
        params = self._params
        outputs = np.fromiter(self._counts, dtype=np.int64, count=len(self._counts))
        if params.repetition_penalty != 1.0:
            seen = _on(np.union1d(self._in_prompt, outputs), row)
            logits = row[seen]
            row[seen] = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        if len(outputs) and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
            counts = np.fromiter(self._counts.values(), dtype=np.float64, count=len(outputs))
            loss = (counts * params.frequency_penalty + params.presence_penalty).astype(np.float32)
            row[_on(outputs, row)] -= torch.from_numpy(loss).to(row.device)


class ThinkingLimit:
    """Where one sequence stands with its budget."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._ends = {budget.end_id, *budget.end_ids}
        self.rewind()

    def rewind(self) -> None:
        """Forget what was read of the outputs."""
        self._num_read = 0
        self._num_tokens = 0
        self._is_open = self._budget.is_open
        self._is_spent = False

    def is_due(self, outputs: npt.NDArray[np.int32]) -> bool:
        """Whether reasoning is to end now. outputs: int32[n], all so far, which begin with those of the last call unless `rewind` was called."""
        for end in range(self._num_read + 1, len(outputs) + 1):
            self._read(outputs, end)
        self._num_read = len(outputs)
        return self._is_over

    @property
    def _is_over(self) -> bool:
        return self._is_open and not self._is_spent and self._num_tokens >= self._budget.num_tokens

    def _read(self, outputs: npt.NDArray[np.int32], end: int) -> None:
        """Read the output before index `end`."""
        token_id = int(outputs[end - 1])
        if not self._is_open:
            self._is_open = any(
                token_id == begin[-1] and tuple(outputs[max(0, end - len(begin)) : end].tolist()) == begin
                for begin in self._budget.begins
            )
        elif token_id in self._ends:
            self._is_spent = self._is_over
            self._is_open = False
        else:
            self._num_tokens += 1


class LogitEdits:
    """Applies one sequence's parameters to its logits. The caller extends `history` and then calls `append`."""

    def __init__(
        self, params: ResolvedSamplingParams, new: NewSequence, history: TokenHistory, vocab_size: int
    ) -> None:
        bias: dict[int, float] = {}
        for token_id, value in params.logit_bias:
            bias[token_id] = bias.get(token_id, 0.0) + value
        self._bias_ids = np.array(list(bias), dtype=np.int64)
        self._bias = np.array(list(bias.values()), dtype=np.float32)
        self._bad_words = tuple(np.array(word, dtype=np.int32) for word in params.bad_words if word)
        self._allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        self._min_new_tokens = params.min_new_tokens
        self._ends = _in_vocabulary(np.array([*new.end_token_ids, *params.stop_token_ids], dtype=np.int64), vocab_size)
        self._vocab_size = vocab_size
        self._history = history
        self._thinking = None if params.thinking_budget is None else ThinkingLimit(params.thinking_budget)
        self._end_of_thinking = 0 if params.thinking_budget is None else params.thinking_budget.end_id
        self._penalties: Penalties | None = None
        if uses_penalties(params):
            prompt = history.prompt if new.content.has_tokens else history.prompt[:0]
            self._penalties = Penalties(params, prompt, vocab_size)
            self._penalties.recount(history.outputs)

    def append(self, token_id: int) -> None:
        """A new output token is in the history."""
        if self._penalties is not None:
            self._penalties.count(token_id)

    def rewind(self) -> None:
        if self._penalties is not None:
            self._penalties.recount(self._history.outputs)
        if self._thinking is not None:
            self._thinking.rewind()

    def apply(self, row: torch.Tensor, num_outputs: int) -> None:
        """Edit row float32[V] in place. num_outputs: outputs so far."""
        if len(self._bias):
            row[_on(self._bias_ids, row)] += torch.from_numpy(self._bias).to(row.device)
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._thinking is not None and self._thinking.is_due(self._history.outputs):
            row[self._end_of_thinking] = FORCED
        banned = list(self._banned_by_bad_words())
        if num_outputs < self._min_new_tokens:
            banned += self._ends.tolist()
        if len(self._allowed):
            allowed = _on(self._allowed, row)
            kept = row[allowed]
            row.fill_(-torch.inf)
            row[allowed] = kept
        if banned:
            row[_on(np.array(banned, dtype=np.int64), row)] = -torch.inf

    def _banned_by_bad_words(self) -> Iterable[int]:
        """Last ids of the bad words whose other ids are the latest outputs. A bad word cannot begin in the prompt."""
        outputs = self._history.outputs
        for word in self._bad_words:
            lead = len(word) - 1
            if (
                lead <= len(outputs)
                and 0 <= word[-1] < self._vocab_size
                and np.array_equal(outputs[len(outputs) - lead :], word[:-1])
            ):
                yield int(word[-1])


def uses_penalties(params: ResolvedSamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def edits_logits(params: ResolvedSamplingParams) -> bool:
    return uses_penalties(params) or _has_other_edits(params)


def edits_only_by_penalties(task: SampleTask, new: NewSequence) -> bool:
    """Whether penalties are the only edits that the logits of `new`, whose task this is, need."""
    others = _has_other_edits(task.params) or task.custom_logit_processor or not new.content.has_tokens
    return uses_penalties(task.params) and not others


def _has_other_edits(params: ResolvedSamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.bad_words
        or params.allowed_token_ids
        or params.min_new_tokens
        or params.thinking_budget
    )


_NO_IDS = np.empty(0, dtype=np.int64)


def _in_vocabulary(ids: npt.NDArray[np.integer], vocab_size: int) -> Int64Array:
    # An id outside the vocabulary cannot be sampled, so there is nothing to forbid or penalise.
    return ids[(ids >= 0) & (ids < vocab_size)].astype(np.int64)


def _on(ids: Int64Array, row: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids).to(row.device)


class DevicePenalties:
    """Penalties of rows 0 .. max_seqs - 1 of the token buffer, whose tokens the host does not know yet: counted and applied on the device.

    Owns how often each sequence has said each id, and which ids its prompt has; it reads the tokens from the buffer, into which the step
    before wrote. What penalties mean is defined by `Penalties`; the logits are the same bit for bit. Nothing here waits for the device.
    tokens: the buffer, int64[max_seqs + 1, context_length + 1], on the device. upload: copies an array there without waiting.
    """

    def __init__(
        self, tokens: torch.Tensor, vocab_size: int, upload: Callable[[npt.NDArray[np.generic]], torch.Tensor]
    ) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._upload = upload
        max_seqs = tokens.shape[0] - 1
        self._active: set[int] = set()
        # Frequency, presence, repetition.
        self._parameters = np.zeros((3, max_seqs), dtype=np.float64)
        self._num_prompt_tokens = [0] * max_seqs
        # Tokens of each sequence that its counts have; -1 = the counts are another sequence's.
        self._num_counted = [-1] * max_seqs
        # [max_seqs, vocab_size], twice the number of outputs, plus one where the prompt has the id.
        self._counts: torch.Tensor | None = None

    def set(self, seq: int, params: ResolvedSamplingParams, num_prompt_tokens: int) -> None:
        """Row `seq` is of a sequence that enters or re-enters, with these penalties; its tokens are in the buffer."""
        self._active.add(seq)
        self._parameters[:, seq] = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
        self._num_prompt_tokens[seq] = num_prompt_tokens
        self._num_counted[seq] = -1

    def discard(self, seq: int) -> None:
        """Row `seq` is of a sequence without penalties."""
        self._active.discard(seq)

    def any(self, seqs: Ints) -> bool:
        return bool(self._active) and not self._active.isdisjoint(np.asarray(seqs).tolist())

    def apply(self, logits: torch.Tensor, seqs: Ints, positions: Ints) -> None:
        """Edit float32[R, V] in place. Row r is of sequence seqs[r] and gives the token at index positions[r]; those before it are in the
        buffer, or will be by work that is queued already."""
        order = np.asarray(seqs).tolist()
        rows = [row for row, seq in enumerate(order) if seq in self._active]
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            part = np.array(rows[begin : begin + _ROWS_AT_ONCE])
            self._apply(logits, part, np.asarray(seqs)[part], np.asarray(positions)[part])

    def _apply(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        seqs: npt.NDArray[np.integer],
        positions: npt.NDArray[np.integer],
    ) -> None:
        counts = self._counts
        if counts is None:
            size = (len(self._num_counted), self._vocab_size)
            dtype = count_dtype(self._tokens.shape[1] - 1)
            counts = self._counts = torch.zeros(size, dtype=dtype, device=self._tokens.device)
        grown = np.zeros(len(rows), dtype=np.bool_)
        for i, (seq, position) in enumerate(zip(seqs.tolist(), positions.tolist(), strict=True)):
            grown[i] = self._num_counted[seq] == position - 1
            if not grown[i] and self._num_counted[seq] != position:
                self._num_counted[seq] = -1
                self._count_again(counts[seq], seq, position)
                self._num_counted[seq] = position
        parameters = self._parameters[:, seqs]
        values = self._upload(np.vstack((rows, seqs, positions, grown, parameters)))
        at_rows, at_seqs, at_positions, news = values[:4].long()
        if grown.any():
            # One token of each sequence: no place is written twice.
            ids = self._tokens[at_seqs, at_positions - 1].clamp(0, self._vocab_size - 1)
            counts.index_put_((at_seqs, ids), counts[at_seqs, ids] + (2 * news).to(counts.dtype))
            for seq, position in zip(seqs.tolist(), positions.tolist(), strict=True):
                self._num_counted[seq] = position
        frequency, presence, repetition = values[4:].unsqueeze(2)
        seen = counts.index_select(0, at_seqs)
        edited = logits.index_select(0, at_rows)
        if (parameters[2] != 1.0).any():
            factor = repetition.float()
            edited = torch.where(seen > 0, torch.where(edited > 0, edited / factor, edited * factor), edited)
        if parameters[:2].any():
            outputs = seen >> 1
            loss = (outputs.double() * frequency + presence).float()
            edited = torch.where(outputs > 0, edited - loss, edited)
        logits.index_copy_(0, at_rows, edited)

    def _count_again(self, counts: torch.Tensor, seq: int, position: int) -> None:
        """Count the sequence's first `position` tokens from the buffer into its row of the counts."""
        num_prompt = self._num_prompt_tokens[seq]
        ids = self._tokens[seq, :position]
        # An id outside the vocabulary cannot be sampled and counts nowhere.
        ones = ((ids >= 0) & (ids < self._vocab_size)).to(counts.dtype)
        ids = ids.clamp(0, self._vocab_size - 1)
        counts.zero_()
        counts.index_add_(0, ids[:num_prompt], ones[:num_prompt])
        counts.clamp_(max=1)
        counts.index_add_(0, ids[num_prompt:], 2 * ones[num_prompt:])


def count_dtype(context_length: int) -> torch.dtype:
    """The smaller type that holds twice the tokens of a sequence, and one more."""
    return torch.int16 if 2 * context_length + 1 <= torch.iinfo(torch.int16).max else torch.int32


def penalty_bytes(max_seqs: int, vocab_size: int, context_length: int) -> int:
    """Memory that penalties may need, to be kept free of KV cache."""
    rows = min(max_seqs, _ROWS_AT_ONCE)
    return vocab_size * (max_seqs * count_dtype(context_length).itemsize + rows * _BYTES_PER_LOGIT)
