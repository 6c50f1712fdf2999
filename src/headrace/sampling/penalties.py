"""Edits of a row of logits before the draw: bias, penalties, the end of reasoning, bad words, allowed ids, the minimum length.

Owns the edits of one sequence (`LogitEdits`) and the tokens that they need (`TokenHistory`); sequences without edits have neither. Edits
touch only the ids concerned, so their cost depends on the tokens used, not on the vocabulary. Worker's thread.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from headrace.messages.requests import SampleTask
from headrace.messages.step import NewSequence
from headrace.sampling.params import ResolvedSamplingParams
from headrace.sampling.thinking_budget import ThinkingLimit

FORCED = 1e30
"""The logit of a token that is forced: above all others, also after the temperature, but a mask still forbids it."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


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
        """Add an output."""
        if self.num_tokens == len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty_like(self._buffer)))
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1

    def truncate(self, num_tokens: int) -> None:
        """Remove the tokens from index `num_tokens` on."""
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
        """Count a new output token."""
        if 0 <= token_id < self._vocab_size:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def recount(self, output_ids: Int32Array) -> None:
        """Count these outputs instead of those counted so far."""
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
        """The history was truncated."""
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
    """Whether any penalty is not neutral."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def edits_logits(params: ResolvedSamplingParams) -> bool:
    """Whether a sequence with these parameters needs `LogitEdits`."""
    return bool(
        params.logit_bias
        or uses_penalties(params)
        or params.bad_words
        or params.allowed_token_ids
        or params.min_new_tokens
        or params.thinking_budget
    )


def edits_only_by_penalties(task: SampleTask, new: NewSequence) -> bool:
    """Whether penalties are the only edits that the logits of `new`, whose task this is, need."""
    params = task.params
    others = (
        params.logit_bias
        or params.bad_words
        or params.allowed_token_ids
        or params.min_new_tokens
        or params.thinking_budget
    )
    return uses_penalties(params) and not (others or task.custom_logit_processor or not new.content.has_tokens)


_NO_IDS = np.empty(0, dtype=np.int64)


def _in_vocabulary(ids: npt.NDArray[np.integer], vocab_size: int) -> Int64Array:
    # An id outside the vocabulary cannot be sampled, so there is nothing to forbid or penalise.
    return ids[(ids >= 0) & (ids < vocab_size)].astype(np.int64)


def _on(ids: Int64Array, row: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids).to(row.device)
