"""One step as tensors: what `ModelWorkerBatch` says, with the tokens and slots of the runner's tables.

Owns `ForwardBatch`. Made and used by the thread that runs the steps.
"""

from dataclasses import dataclass

import numpy as np
import torch

from headrace.attention.base import StepRows
from headrace.execution.sequence_table import HostTables, SequenceTable
from headrace.messages.step import Int32Array, ModelWorkerBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step's inputs on the model's device.

    token_ids: int64[num_tokens]; ids of positions that have input embeddings are placeholders. seq_rows: int[num_rows], rows of the
    tables. row_starts: host copy of rows.row_starts.
    """

    token_ids: torch.Tensor
    seq_rows: torch.Tensor
    row_starts: list[int]
    rows: StepRows

    @classmethod
    def from_plan(cls, plan: ModelWorkerBatch, table: SequenceTable) -> "ForwardBatch":
        """Look up the plan's tokens and slots, and record where this step's KV goes."""
        num_rows, num_tokens = len(plan.seqs), plan.num_tokens
        seq_lens = plan.starts + plan.counts
        longest = int(seq_lens.max(initial=0))
        assert longest <= table.context_length, (longest, table.context_length)
        if num_tokens == num_rows and int(plan.counts.min(initial=1)) == 1:
            row_starts = np.arange(num_rows + 1, dtype=np.int32)
            places = _Places(plan.seqs, plan.starts, seq_lens, row_starts)
        else:
            row_starts = np.zeros(num_rows + 1, dtype=np.int32)
            np.cumsum(plan.counts, out=row_starts[1:])
            assert int(row_starts[-1]) == num_tokens, (plan.counts, num_tokens)
            positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(plan.starts - row_starts[:-1], plan.counts)
            places = _Places(np.repeat(plan.seqs, plan.counts), positions, seq_lens, row_starts)
        if table.host is not None:
            return cls._on_host(plan, table.host, places, longest)
        return cls._on_device(plan, table, places, longest)

    @classmethod
    def _on_host(cls, plan: ModelWorkerBatch, host: HostTables, places: "_Places", longest: int) -> "ForwardBatch":
        index = (places.token_rows, places.positions)
        host.slots[index] = plan.out_slots
        rows = StepRows(
            starts=plan.starts.tolist(),
            counts=plan.counts.tolist(),
            positions=torch.from_numpy(places.positions),
            seq_lens=torch.from_numpy(places.seq_lens),
            row_starts=torch.from_numpy(places.row_starts),
            out_slots=torch.from_numpy(plan.out_slots),
            slots=torch.from_numpy(host.slots[plan.seqs, :longest]),
        )
        return cls(
            token_ids=torch.from_numpy(host.tokens[index]),
            seq_rows=torch.from_numpy(plan.seqs),
            row_starts=places.row_starts.tolist(),
            rows=rows,
        )

    @classmethod
    def _on_device(
        cls, plan: ModelWorkerBatch, table: SequenceTable, places: "_Places", longest: int
    ) -> "ForwardBatch":
        device = table.tokens.device

        def place(array: Int32Array, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.from_numpy(array).to(device=device, dtype=dtype)

        seq_rows = place(plan.seqs, torch.int64)
        index = (place(places.token_rows, torch.int64), place(places.positions, torch.int64))
        out_slots = place(plan.out_slots)
        table.slots[index] = out_slots
        rows = StepRows(
            starts=plan.starts.tolist(),
            counts=plan.counts.tolist(),
            positions=place(places.positions),
            seq_lens=place(places.seq_lens),
            row_starts=place(places.row_starts),
            out_slots=out_slots,
            slots=table.slots[:, :longest][seq_rows],
        )
        return cls(token_ids=table.tokens[index], seq_rows=seq_rows, row_starts=places.row_starts.tolist(), rows=rows)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each token (row of the tables, position) and each row of a step lies."""

    token_rows: Int32Array
    positions: Int32Array
    seq_lens: Int32Array
    row_starts: Int32Array
