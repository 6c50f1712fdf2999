"""Where a step's tokens and KV lie, told by a table of slots and by a table of pages."""

import numpy as np
import torch
from runner_harness import int32

from headrace.attention.base import KvShape
from headrace.attention.cpu import CpuAttention
from headrace.execution.forward_batch import ForwardBatch
from headrace.execution.sequence_table import SequenceTable
from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import ModelWorkerBatch, NewSequence
from headrace.sampling.params import ResolvedSamplingParams

PAGE = 16
GREEDY = SampleTask(ResolvedSamplingParams(max_new_tokens=64, seed=0, temperature=0.0))
UNREAD = PromptContent(b"")


def slots_of(pages, start, count):
    return [pages[p // PAGE] * PAGE + p % PAGE for p in range(start, start + count)]


def plan_of(*rows):
    """rows: (seq, its pages, start, count)."""
    seqs, starts, counts = (int32([row[i] for row in rows]) for i in (0, 2, 3))
    out_slots = [slot for _, pages, start, count in rows for slot in slots_of(pages, start, count)]
    num_logits = np.ones(len(rows), np.int32)
    return ModelWorkerBatch(
        step=0, new=(), seqs=seqs, starts=starts, counts=counts, num_logits=num_logits, out_slots=int32(out_slots)
    )


def test_both_tables_lead_to_the_same_places():
    shape = KvShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    first, second = [5, 2, 9], [7, 1, 3]
    # The first has two cached pages; the second enters with a prompt of 20 tokens in two chunks, then both decode over a page's end.
    plans = [
        plan_of((3, first, 32, 8), (0, second, 0, 12)),
        plan_of((3, first, 40, 1), (0, second, 12, 8)),
        *(plan_of((0, second, 20 + i, 1), (3, first, 41 + i, 1)) for i in range(7)),
        plan_of((0, second, 27, 7), (3, first, 47, 1)),
    ]
    seen = []
    for page_size in (0, PAGE):
        table = SequenceTable(4, 64, torch.device("cpu"), page_size=page_size)
        attention = CpuAttention()
        attention.make_kv_pool(shape, 12 * PAGE, PAGE, torch.device("cpu"))
        cached, nothing = int32(slots_of(first, 0, 32)), int32([])
        table.add(NewSequence(3, "first", int32(range(100, 164)), 64, cached, GREEDY, (), UNREAD))
        table.add(NewSequence(0, "second", int32(range(200, 264)), 64, nothing, GREEDY, (), UNREAD))
        for plan in plans:
            batch = ForwardBatch.from_plan(plan, table)
            attention.prepare(batch.rows)
            kv = attention.paged_kv()
            assert kv is not None
            seen.append(
                (
                    batch.token_ids.tolist(),
                    batch.row_starts,
                    batch.rows.positions.tolist(),
                    batch.rows.seq_lens.tolist(),
                    batch.rows.row_starts.tolist(),
                    [
                        kv.page_table[row, : -(-length // PAGE)].tolist()
                        for row, length in enumerate(batch.rows.seq_lens.tolist())
                    ],
                )
            )
    half = len(seen) // 2
    assert seen[:half] == seen[half:]
    assert seen[half - 1] == (
        [227, 228, 229, 230, 231, 232, 233, 147],
        [0, 7, 8],
        [27, 28, 29, 30, 31, 32, 33, 47],
        [34, 48],
        [0, 7, 8],
        [second, first],
    )
