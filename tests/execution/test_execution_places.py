"""Where a step's tokens and KV lie, told by a table of slots and by a table of pages."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from runner_harness import int32

from headrace.attention.base import KvShape, OwnRows
from headrace.attention.cpu import CpuAttention
from headrace.execution.forward_batch import ForwardBatch, SequenceTable
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


@pytest.mark.parametrize("page_size", [0, PAGE])
def test_a_rank_with_a_part_of_the_cache_prepares_attention_for_its_own_rows(page_size):
    """Of two parts of 8 pages; the plan's pages are numbered over both."""
    first, second, third = [5, 2], [8 + 3, 8 + 1], [8 + 7]
    rows = [(3, first, 16, 4), (0, second, 16, 2), (1, third, 0, 3)]
    plan = replace(plan_of(*rows), part_starts=(0, 1, 3))
    batches = []
    for part in range(2):
        table = SequenceTable(4, 64, torch.device("cpu"), page_size=page_size, part=part, first_slot=part * 8 * PAGE)
        for (seq, pages, start, _), begin in zip(rows, (100, 200, 300), strict=True):
            cached = int32(slots_of(pages, 0, start))
            table.add(NewSequence(seq, str(seq), int32(range(begin, begin + 40)), 40, cached, GREEDY, (), UNREAD))
        batches.append(ForwardBatch.from_plan(plan, table))

    for batch in batches:
        assert batch.token_ids.tolist() == [116, 117, 118, 119, 216, 217, 300, 301, 302]
        assert (batch.starts, batch.counts, batch.row_starts) == ([16, 16, 0], [4, 2, 3], [0, 4, 6, 9])
    assert [batch.own for batch in batches] == [
        OwnRows(slice(0, 1), slice(0, 4)),
        OwnRows(slice(1, 3), slice(4, 9)),
    ]
    one, two = (batch.rows for batch in batches)
    assert (one.positions.tolist(), two.positions.tolist()) == ([16, 17, 18, 19], [16, 17, 0, 1, 2])
    assert one.out_slots.tolist() == slots_of([5, 2], 16, 4)
    assert two.out_slots.tolist() == slots_of([3, 1], 16, 2) + slots_of([7], 0, 3)
    if page_size:
        assert (one.pages[0, :2].tolist(), two.pages[0, :2].tolist()) == ([5, 2], [3, 1])
    else:
        assert (one.slots[0, :20].tolist(), two.slots[0, :18].tolist()) == (
            slots_of([5, 2], 0, 20),
            slots_of([3, 1], 0, 18),
        )


def test_a_rank_without_rows_in_a_step_has_nothing_to_prepare():
    plan = replace(plan_of((3, [5], 0, 4)), part_starts=(0, 1, 1))
    table = SequenceTable(4, 64, torch.device("cpu"), page_size=PAGE, part=1, first_slot=8 * PAGE)
    table.add(NewSequence(3, "3", int32(range(9)), 9, int32([]), GREEDY, (), UNREAD))
    batch = ForwardBatch.from_plan(plan, table)

    assert batch.token_ids.tolist() == [0, 1, 2, 3]
    assert batch.own == OwnRows(slice(1, 1), slice(4, 4))
    assert batch.rows.starts == batch.rows.positions.tolist() == []
