"""Decode steps as captured CUDA graphs, one per batch size: a step costs the host one copy and one launch.

Owns the persistent inputs and outputs that the graphs read and write, and the choice of a size. Does not own the capture itself
(`device.Device`) nor the tables. Used by the thread that runs the steps.

A graph runs a fixed number of rows. Unused rows are padding: they use a row of the tables without a sequence
(`SequenceTable.spare`), at position 0, and write their KV to a slot that the scheduler does not use (`dummy_slot`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.attention.base import AttentionBackend, StepRows
from headrace.execution.device import Device, Graph
from headrace.execution.sequence_table import SequenceTable
from headrace.log import get_logger
from headrace.messages.step import Int32Array
from headrace.models.spec import CausalLM
from headrace.sampling.draw import greedy_ids

_FIXED_BYTES = 512 << 20
"""Bytes reserved for the graphs themselves and for library workspaces."""

_BYTES_PER_LOGIT = 24
"""Bytes per row and vocabulary entry: the persistent logits, those of the step in two precisions, and temporaries of the argmax."""

_NOTHING = np.empty(0, np.int32)

_logger = get_logger(__name__)


def graph_bytes(size: int, vocab_size: int, hidden_size: int, context_length: int, more_row_bytes: int = 0) -> int:
    """Bytes that the graphs of batches up to `size` may need, to be reserved. more_row_bytes: further bytes per row, for attention or ranks."""
    row = vocab_size * _BYTES_PER_LOGIT + context_length * 4 + hidden_size * 64 + more_row_bytes
    return _FIXED_BYTES + size * row


@dataclass(frozen=True, slots=True)
class GraphStep:
    """The result of a replay, to be used before the next one. logits: float32[num_rows, V]. greedy: int64[num_rows], the most likely ids, -1
    in rows without a finite largest logit; the token buffer holds them. seqs, positions: int64[num_rows] on the device."""

    logits: torch.Tensor
    greedy: torch.Tensor
    seqs: torch.Tensor
    positions: torch.Tensor


class GraphPool:
    """Graphs of decode steps: tokens in from the token buffer, logits and greedy tokens out.

    sizes: numbers of rows, ascending. dummy_slot: of the KV pool, beyond what the scheduler hands out. greedy: the most likely ids of logits. Of
    several ranks, a follower's logits have the columns of its part (vocab_size), and `greedy` receives the ids.
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
    ) -> None:
        assert sizes == tuple(sorted(set(sizes))), sizes
        assert sizes[0] > 0, sizes
        self.sizes = sizes
        self._model = model
        self._attention = attention
        self._table = table
        self._device = device
        self._dummy_slot = dummy_slot
        self._greedy_of = greedy
        on = table.tokens.device
        largest = sizes[-1]
        self._inputs = torch.zeros(3 * largest, dtype=torch.int64, device=on)
        self._logits = torch.zeros(largest, vocab_size, dtype=torch.float32, device=on)
        self._greedy = torch.zeros(largest, dtype=torch.int64, device=on)
        self._row_starts = torch.arange(largest + 1, dtype=torch.int32, device=on)
        self._graphs: dict[int, Graph] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first. To be repeated when the weights have moved."""
        self._graphs.clear()
        for size in reversed(self.sizes):
            self._fill(size, _NOTHING, _NOTHING, _NOTHING)
            self._graphs[size] = self._device.capture(lambda size=size: self._step(size))  # type: ignore[misc]
        _logger.debug("captured decode steps of %s rows", ", ".join(map(str, self.sizes)))

    def size_for(self, num_rows: int) -> int | None:
        """The smallest size with at least `num_rows` rows; None if there is none."""
        return next((size for size in self.sizes if size >= num_rows), None)

    def replay(self, seqs: Int32Array, positions: Int32Array, out_slots: Int32Array) -> GraphStep:
        """Queue one decode step: row r computes position positions[r] of sequence seqs[r]. At most `sizes[-1]` rows."""
        num_rows = len(seqs)
        size = self.size_for(num_rows)
        assert size is not None, (num_rows, self.sizes)
        self._fill(size, seqs, positions, out_slots)
        self._graphs[size].replay()
        at_rows, at_positions, _ = self._inputs[: 3 * size].view(3, size)
        return GraphStep(self._logits[:num_rows], self._greedy[:num_rows], at_rows[:num_rows], at_positions[:num_rows])

    def _fill(self, size: int, seqs: Int32Array, positions: Int32Array, out_slots: Int32Array) -> None:
        """Queue the copy of a step's rows, and of padding up to `size`, to the inputs."""
        inputs = np.zeros((3, size), dtype=np.int64)
        inputs[0], inputs[2] = self._table.spare, self._dummy_slot
        for part, values in zip(inputs, (seqs, positions, out_slots), strict=True):
            part[: len(values)] = values
        self._device.upload(inputs.reshape(-1), self._inputs[: 3 * size])

    def _step(self, size: int) -> None:
        """The work to capture: one decode step from the persistent inputs to the persistent outputs, without waiting for the device."""
        table = self._table
        seqs, positions, out_slots = self._inputs[: 3 * size].view(3, size)
        table.slots.index_put_((seqs, positions), out_slots.int())
        token_ids = table.tokens[seqs, positions]
        rows = StepRows(
            starts=[table.context_length - 1] * size,
            counts=[1] * size,
            positions=positions.int(),
            seq_lens=(positions + 1).int(),
            row_starts=self._row_starts[: size + 1],
            out_slots=out_slots.int(),
            slots=table.slots.index_select(0, seqs),
        )
        hidden = self._model.embed(token_ids)
        self._attention.prepare(rows)
        logits = self._model.logits(self._model.forward(hidden, rows.positions, self._attention))
        greedy = self._greedy_of(logits)
        table.tokens.index_put_((seqs, positions + 1), greedy.clamp(min=0))
        self._logits[:size].copy_(logits)
        self._greedy[:size].copy_(greedy)
