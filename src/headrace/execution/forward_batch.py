"""One step as tensors: what `ModelWorkerBatch` says, with the tokens and slots of the runner's tables.

Owns `ForwardBatch`. Made and used by the thread that runs the steps.
"""

from dataclasses import dataclass

import numpy as np
import torch

from headrace.attention.base import StepRows
from headrace.execution.sequence_table import SequenceTable
from headrace.messages.step import ModelWorkerBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step's inputs on the model's device.

    token_ids: int64[num_tokens]; ids of positions that have input embeddings are placeholders. seq_rows: int64[num_rows], rows of
    the tables. row_starts: host copy of rows.row_starts.
    """

    token_ids: torch.Tensor
    seq_rows: torch.Tensor
    row_starts: list[int]
    rows: StepRows

    @classmethod
    def from_plan(cls, plan: ModelWorkerBatch, table: SequenceTable) -> "ForwardBatch":
        """Look up the plan's tokens and slots, and record where this step's KV goes."""
        device = table.tokens.device
        num_tokens = plan.num_tokens
        row_starts = np.zeros(len(plan.seqs) + 1, dtype=np.int32)
        np.cumsum(plan.counts, out=row_starts[1:])
        assert int(row_starts[-1]) == num_tokens, (plan.counts, num_tokens)
        seq_lens = plan.starts + plan.counts
        longest = int(seq_lens.max(initial=0))
        assert longest <= table.context_length, (longest, table.context_length)
        token_rows = np.repeat(plan.seqs, plan.counts)
        positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(plan.starts - row_starts[:-1], plan.counts)

        def place(array: np.ndarray[tuple[int], np.dtype[np.int32]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device=device, dtype=dtype)

        seq_rows = place(plan.seqs, torch.int64)
        index = (place(token_rows, torch.int64), place(positions, torch.int64))
        out_slots = place(plan.out_slots)
        table.slots[index] = out_slots
        rows = StepRows(
            starts=plan.starts.tolist(),
            counts=plan.counts.tolist(),
            positions=place(positions),
            seq_lens=place(seq_lens),
            row_starts=place(row_starts),
            out_slots=out_slots,
            slots=table.slots[:, :longest][seq_rows],
        )
        return cls(token_ids=table.tokens[index], seq_rows=seq_rows, row_starts=row_starts.tolist(), rows=rows)
