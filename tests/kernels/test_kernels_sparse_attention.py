"""Attention over chosen pages: right against float64 over the pages that the definition chooses; the same bits alone, in a batch, in a chunk."""

import pytest
import torch

from headrace import kernels
from headrace.kernels import cpu
from headrace.kernels.packing import as_native, kv_type, rotation_size, walsh_hadamard

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)

PAGE = kernels.PAGE_SIZE
CHANNELS, PAGES, RECENT = 16, 9, 4
Q_HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64
SCALE = HEAD_DIM**-0.5
# What rounding queries and weights costs over a cache of each kind, for values of unit variance; see test_kernels_attention.py.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.int16: 2e-3, torch.int8: 0.06}
LENGTHS = (700, 333, 1601)


def mixed(x):
    """Blocks of 16 channels added and subtracted, as an int8 cache undoes it but for a factor."""
    blocks = x.unflatten(-1, (-1, rotation_size(HEAD_DIM) // 16, 16))
    return (
        walsh_hadamard(blocks.transpose(-1, -2).contiguous(), rotation_size(HEAD_DIM) // 16)
        .transpose(-1, -2)
        .flatten(-3)
    )


class Cache:
    """Sequences of LENGTHS, whose pages lie anywhere in the cache. The first channels of queries and keys are larger than the others."""

    def __init__(self, dtype):
        torch.manual_seed(5)
        self.dtype = dtype
        pages = [-(-length // PAGE) for length in LENGTHS]
        self.k, self.v = (
            torch.zeros(shape, dtype=dtype) for shape in kernels.kv_cache_shapes(sum(pages), KV_HEADS, HEAD_DIM, dtype)
        )
        self.table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
        free = torch.randperm(sum(pages)).to(torch.int32)
        self.queries, self.keys, self.values = [], [], []
        weight = torch.cat([torch.full((CHANNELS,), 2.0), torch.full((HEAD_DIM - CHANNELS,), 0.3)])
        for row, length in enumerate(LENGTHS):
            self.table[row, : pages[row]], free = free[: pages[row]], free[pages[row] :]
            q = torch.randn(length, Q_HEADS, HEAD_DIM) * weight
            k, v = (torch.randn(length, KV_HEADS, HEAD_DIM) for _ in range(2))
            k *= weight
            slots = (
                self.table[row, torch.arange(length) // PAGE] * PAGE + torch.arange(length, dtype=torch.int32) % PAGE
            )
            if dtype == torch.int8:
                q, k = mixed(q) / (rotation_size(HEAD_DIM) // 16), mixed(k)
            kernels.write_kv(k, v, self.k, self.v, slots)
            k, v = kernels.gather_kv(self.k, self.v, slots)
            self.queries.append(q)
            self.keys.append(k)
            self.values.append(v)

    def attend(self, rows, counts, first):
        """The last counts[i] positions of sequences rows[i], sparsely from first[i] on."""
        q = torch.cat([self.queries[row][-count:] for row, count in zip(rows, counts, strict=True)]).contiguous()
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([LENGTHS[row] for row in rows], dtype=torch.int32)
        table, first = self.table[rows].contiguous(), torch.tensor(first, dtype=torch.int32)
        out = torch.empty(q.shape)
        cache = self.k, self.v, kv_type(self.k, False), self.k.shape[0], KV_HEADS, HEAD_DIM
        sequences = table, table.shape[1], lengths, starts, len(rows), len(q)
        cpu.load().sparse_attention(
            *as_native(
                q,
                Q_HEADS * HEAD_DIM,
                out,
                *cache,
                *sequences,
                Q_HEADS,
                SCALE,
                0,
                0.0,
                None,
                first,
                CHANNELS,
                PAGES,
                RECENT,
            )
        )
        return out

    def reference(self, row, position):
        """In float64; also the least distance of a page's score from the choice between it and another."""
        q, k, v = self.queries[row][position].double(), self.keys[row].double(), self.values[row].double()
        if self.dtype == torch.int8:
            q, k = mixed(q), mixed(k) / (rotation_size(HEAD_DIM) // 16)
        own, out, margins = position // PAGE, [], []
        for head in range(Q_HEADS):
            kv_head = head // (Q_HEADS // KV_HEADS)
            group = (
                q[kv_head * 3 : kv_head * 3 + 3, :CHANNELS]
                @ k[: (own - RECENT + 1) * PAGE, kv_head, :CHANNELS].T
                * SCALE
            )
            tops = group.unflatten(1, (-1, PAGE)).amax(2)
            best = (tops - tops.amax(1, keepdim=True)).amax(0)
            order = best[1:].argsort(descending=True) + 1
            wanted = PAGES - RECENT - 1
            margins.append(float(best[order[wanted - 1]] - best[order[wanted]]))
            chosen = sorted([0, *order[:wanted].tolist(), *range(own - RECENT + 1, own + 1)])
            tokens = torch.cat([torch.arange(page * PAGE, min(page * PAGE + PAGE, position + 1)) for page in chosen])
            weights = (k[tokens, kv_head] @ q[head] * SCALE).softmax(0)
            out.append(weights @ v[tokens, kv_head])
        return torch.stack(out), min(margins)


@pytest.fixture(scope="module", params=list(TOLERANCES), ids=str)
def cache(request):
    return Cache(request.param)


def test_right_over_the_pages_that_are_chosen(cache):
    num_checked = 0
    for row, length in enumerate(LENGTHS):
        got = cache.attend([row], [20], [0])
        for i in range(20):
            want, margin = cache.reference(row, length - 20 + i)
            if margin > TOLERANCES[cache.dtype]:  # nearer ones may be chosen either way
                num_checked += 1
                assert (got[i] - want).abs().max() < TOLERANCES[cache.dtype], (row, i)
    assert num_checked > 20


def test_alone_in_a_batch_and_in_a_chunk_are_the_same(cache):
    rows, counts = [0, 1, 2], [3, 1, 5]
    together = cache.attend(rows, counts, [0, 0, 0]).split(counts)
    for row, count in zip(rows, counts, strict=True):
        assert torch.equal(cache.attend([row], [count], [0]), together[row])
        assert torch.equal(cache.attend([row], [1], [0]), together[row][-1:])
    kernels.set_num_threads(1)
    try:
        assert torch.equal(cache.attend(rows, counts, [0, 0, 0]), torch.cat(together))
    finally:
        kernels.set_num_threads(2)


def test_positions_before_the_first_attend_to_all(cache):
    length = LENGTHS[2]
    dense = cache.attend([2], [6], [length])
    assert torch.equal(cache.attend([2], [6], [length - 2])[:4], dense[:4])
    assert not torch.equal(cache.attend([2], [6], [length - 2])[4:], dense[4:])
    assert torch.equal(cache.attend([1], [1], [LENGTHS[1]]), cache.attend([1], [1], [1 << 20]))


def test_instruction_sets_agree(cache):
    """But baseline, which has no fused multiply-add."""
    isas = [isa for isa, reason in cpu.isas() if not reason and isa != "baseline"]
    try:
        found = []
        for isa in isas:
            cpu.select_isa(isa)
            found.append(cache.attend([0, 2], [4, 4], [0, 0]))
    finally:
        cpu.select_isa(isas[0])
    assert all(torch.equal(found[0], other) for other in found[1:])
