"""Decode steps as captured CUDA graphs, one per batch size: a step costs the host one copy and one launch.

Owns the persistent inputs and outputs that the graphs read and write, and the choice of a size. Does not own the capture itself
(`device.Device`) nor the tables. Used by the thread that runs the steps.

A graph runs a fixed number of rows. Unused rows are padding: they use a row of the tables without a sequence
(`SequenceTable.spare`), at position 0, and write their KV to a slot that the scheduler does not use (`dummy_slot`).

A step that verifies drafts has graphs of its own. To them each token of the step, known or draft, is a row: a layer writes K and V of all rows before
it attends, so a draft sees the drafts before it, and how many tokens a sequence has in the step is in the inputs alone:

    sequences      a: 3 known, drafts x y      b: 8 known       c: 5 known, draft z     padding
    rows           a2    a3 (x)    a4 (y)      b7               c4    c5 (z)            spare0 ...
    num_after      2     1         0           0                1     0                 0
    num_right      how many of the drafts after a row were chosen, up to the first that was not
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from headrace.attention.base import AttentionBackend, StepRows
from headrace.execution.device import Device
from headrace.execution.forward_batch import SequenceTable, cumulative, token_places
from headrace.log import get_logger
from headrace.messages.step import MOST_VERIFIED, Int32Array
from headrace.models.spec import CausalLM
from headrace.sampling.draw import greedy_ids

_FIXED_BYTES = 512 << 20
"""Bytes reserved for the graphs themselves and for library workspaces."""

_BYTES_PER_LOGIT = 24
"""Bytes per row and vocabulary entry: the persistent logits, those of the step in two precisions, and temporaries of the argmax."""

_BYTES_PER_VERIFYING_GRAPH = 16 << 20
"""Of one of the graphs that verify drafts, itself."""

_VERIFYING_SIZES = (4, 8, 16, 32)
"""Tokens of a step that verifies drafts. The largest size is that of the largest step."""

_NOTHING = np.empty(0, np.int32)

_logger = get_logger(__name__)


def graph_bytes(
    size: int,
    vocab_size: int,
    hidden_size: int,
    context_length: int,
    more_row_bytes: int = 0,
    verifying_sizes: tuple[int, ...] = (),
) -> int:
    """Bytes that the graphs of batches up to `size`, and those of these sizes that verify drafts, may need, to be reserved. more_row_bytes: further
    bytes per row, for attention or ranks."""
    row = vocab_size * _BYTES_PER_LOGIT + context_length * 4 + hidden_size * 64 + more_row_bytes
    fixed = _FIXED_BYTES + len(verifying_sizes) * _BYTES_PER_VERIFYING_GRAPH
    return fixed + max((size, *verifying_sizes)) * row


def verifying_sizes(max_seqs: int, most_drafts: int) -> tuple[int, ...]:
    """Numbers of tokens, ascending, for which graphs that verify drafts are worth it. max_seqs: most rows of a step. most_drafts: of a row."""
    num_rows = range(1, min(max_seqs, MOST_VERIFIED // 2) + 1)
    largest = max(rows * min(1 + most_drafts, MOST_VERIFIED // rows) for rows in num_rows)
    return (*(size for size in _VERIFYING_SIZES if size < largest), largest)


@dataclass(frozen=True, slots=True)
class GraphStep:
    """The result of a replay, to be used before the next one. logits: float32[num_rows, V]. greedy: int64[num_rows], the most likely ids, -1
    in rows without a finite largest logit; the token buffer holds them. seqs, positions: int64[num_rows] on the device."""

    logits: torch.Tensor
    greedy: torch.Tensor
    seqs: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class VerifiedStep(GraphStep):
    """Of a step that verifies drafts: each of its tokens is a row. All int64[num_rows] on the device.

    drafts: what stood in the token buffer after each row, a draft where num_after > 0. num_after: drafts after the row, in its sequence.
    num_right: see `num_right`, of the greedy ids.
    """

    drafts: torch.Tensor
    num_after: torch.Tensor
    num_right: torch.Tensor


def num_right(ids: torch.Tensor, drafts: torch.Tensor, num_after: torch.Tensor) -> torch.Tensor:
    """int64[R]: how many of the drafts from each row on were chosen, up to the first that was not. All int64[R]; does not wait for the device.

    ids: chosen after each row. drafts: what was guessed to come there. num_after: drafts from there on; 0 = there is none.
    """
    places = torch.arange(len(ids), device=ids.device)
    # The last row of a sequence has no draft after it, so no run goes on into the next sequence.
    ends = torch.where((ids == drafts) & (num_after > 0), len(ids), places)
    next_end = ends.flip(0).cummin(0).values.flip(0)
    return next_end - places


class GraphPool:
    """Graphs of decode steps: tokens in from the token buffer, logits and greedy tokens out.

    sizes: numbers of rows, ascending. dummy_slot: of the KV pool, beyond what the scheduler hands out. greedy: the most likely ids of logits. Of
    several ranks, a follower's logits have the columns of its part (vocab_size), and `greedy` receives the ids. verifying_sizes: numbers of tokens,
    ascending, of steps that verify drafts; empty = none.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        table: SequenceTable,
        device: Device,
        sizes: tuple[int, ...],
        vocab_size: int,
        dummy_slot: int,
        greedy: Callable[[torch.Tensor], torch.Tensor] = greedy_ids,
        verifying_sizes: tuple[int, ...] = (),
    ) -> None:
        assert sizes == tuple(sorted(set(sizes))), sizes
        assert verifying_sizes == tuple(sorted(set(verifying_sizes))), verifying_sizes
        assert sizes[0] > 0, sizes
        self.sizes = sizes
        self.verifying_sizes = verifying_sizes
        self._model = model
        self._attention = attention
        self._table = table
        self._device = device
        self._dummy_slot = dummy_slot
        self._greedy_of = greedy
        on = table.tokens.device
        largest = max((*sizes, *verifying_sizes))
        self._inputs = torch.zeros(4 * largest, dtype=torch.int64, device=on)
        self._logits = torch.zeros(largest, vocab_size, dtype=torch.float32, device=on)
        self._greedy = torch.zeros(largest, dtype=torch.int64, device=on)
        self._drafts, self._right = torch.zeros(2, max((*verifying_sizes, 0)), dtype=torch.int64, device=on)
        self._row_starts = torch.arange(largest + 1, dtype=torch.int32, device=on)
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}  # by size, and whether they verify

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first. To be repeated when the weights have moved."""
        self._graphs.clear()
        kinds = [(size, False) for size in self.sizes] + [(size, True) for size in self.verifying_sizes]
        for size, verifies in sorted(kinds, reverse=True):
            self._fill(size, (_NOTHING,) * (4 if verifies else 3))
            self._graphs[size, verifies] = self._device.capture(partial(self._verify if verifies else self._step, size))
        _logger.debug("captured decode steps of %s rows", ", ".join(map(str, self.sizes)))
        if self.verifying_sizes:
            _logger.debug("captured steps with drafts of %s tokens", ", ".join(map(str, self.verifying_sizes)))

    def size_for(self, num_rows: int, verifies: bool = False) -> int | None:
        """The smallest captured size with at least `num_rows` rows; None if there is none. verifies: of a step that verifies drafts, whose tokens are
        rows."""
        return min(
            (size for size, of_drafts in self._graphs if of_drafts == verifies and size >= num_rows), default=None
        )

    def replay(self, seqs: Int32Array, positions: Int32Array, out_slots: Int32Array) -> GraphStep:
        """Queue one decode step: row r computes position positions[r] of sequence seqs[r]. At most `sizes[-1]` rows."""
        num_rows = len(seqs)
        size = self.size_for(num_rows)
        assert size is not None, (num_rows, self.sizes)
        self._fill(size, (seqs, positions, out_slots))
        self._graphs[size, False]()
        at_rows, at_positions, _ = self._inputs[: 3 * size].view(3, size)
        return GraphStep(self._logits[:num_rows], self._greedy[:num_rows], at_rows[:num_rows], at_positions[:num_rows])

    def verify(self, seqs: Int32Array, starts: Int32Array, counts: Int32Array, out_slots: Int32Array) -> VerifiedStep:
        """Queue one step that verifies drafts: positions starts[i] .. starts[i] + counts[i] - 1 of sequence seqs[i], the first of which is known and
        the others are drafts. At most `verifying_sizes[-1]` tokens. The greedy ids are in the token buffer, in place of the drafts."""
        num_rows = len(out_slots)
        size = self.size_for(num_rows, verifies=True)
        assert size is not None, (num_rows, self.verifying_sizes)
        at_seqs, positions = token_places(seqs, starts, counts, cumulative(counts))
        self._fill(size, (at_seqs, positions, out_slots, np.repeat(starts + counts - 1, counts) - positions))
        self._graphs[size, True]()
        of_rows = self._inputs[: 4 * size].view(4, size)[:, :num_rows]
        return VerifiedStep(
            logits=self._logits[:num_rows],
            greedy=self._greedy[:num_rows],
            seqs=of_rows[0],
            positions=of_rows[1],
            drafts=self._drafts[:num_rows],
            num_after=of_rows[3],
            num_right=self._right[:num_rows],
        )

    def _fill(self, size: int, values: tuple[Int32Array, ...]) -> None:
        """Queue the copy of a step's rows, and of padding up to `size`, to the inputs. values: seqs, positions, out_slots, and what else there is."""
        inputs = np.zeros((len(values), size), dtype=np.int64)
        inputs[0], inputs[2] = self._table.spare, self._dummy_slot
        for part, of_rows in zip(inputs, values, strict=True):
            part[: len(of_rows)] = of_rows
        self._device.upload(inputs.reshape(-1), self._inputs[: inputs.size])

    def _step(self, size: int) -> None:
        """The work to capture: one decode step from the persistent inputs to the persistent outputs, without waiting for the device."""
        self._run(size)

    def _verify(self, size: int) -> None:
        seqs, positions, _, num_after = self._inputs[: 4 * size].view(4, size)
        self._drafts[:size].copy_(self._table.tokens[seqs, positions + 1])  # before the greedy ids take their places
        self._run(size, share_sequences=True)
        self._right[:size].copy_(num_right(self._greedy[:size], self._drafts[:size], num_after))

    def _run(self, size: int, *, share_sequences: bool = False) -> None:
        """The layers and the greedy ids of rows of one token."""
        table = self._table
        seqs, positions, _ = self._inputs[: 3 * size].view(3, size)
        narrow_positions, narrow_slots = self._inputs[size : 3 * size].view(2, size).int()
        table.slots.index_put_((seqs, positions), narrow_slots)
        token_ids = table.tokens[seqs, positions]
        rows = StepRows(
            starts=[table.context_length - 1] * size,
            counts=[1] * size,
            positions=narrow_positions,
            seq_lens=narrow_positions + 1,
            row_starts=self._row_starts[: size + 1],
            out_slots=narrow_slots,
            slots=table.slots.index_select(0, seqs),
            share_sequences=share_sequences,
        )
        hidden = self._model.embed(token_ids)
        self._attention.prepare(rows)
        logits = self._model.logits(self._model.forward(hidden, rows.positions, self._attention))
        greedy = self._greedy_of(logits)
        table.tokens.index_put_((seqs, positions + 1), greedy.clamp(min=0))
        self._logits[:size].copy_(logits)
        self._greedy[:size].copy_(greedy)
