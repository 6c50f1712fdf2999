"""Repetition, frequency and presence penalties of sequences whose tokens the host does not know yet: counted and applied on the device.

Owns how often each sequence has said each id, and which ids its prompt has. Does not own the tokens: it reads them from the runner's
token buffer, into which the step before wrote. What penalties mean is defined by `penalties.Penalties`; the logits are the same bit for
bit. Used by the thread that runs the steps; nothing here waits for the device.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.sampling.params import ResolvedSamplingParams

_ROWS_AT_ONCE = 32
_BYTES_PER_LOGIT = 48
"""What the edit of one row takes beside it for each id: its counts, logits and losses, some of them twice."""

Ints = Sequence[int] | npt.NDArray[np.int32]


class DevicePenalties:
    """Penalties of rows 0 .. max_seqs - 1 of the token buffer.

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
        """Whether one of these sequences has penalties."""
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
