"""The FlashInfer backend over a fake of the library that reads pages and plans as its documentation has them: our part of the bargain."""

import sys
from types import ModuleType

import pytest
import torch

from headrace.attention import flashinfer
from headrace.attention.base import AttentionLayerSpec, KvShape, StepRows
from headrace.attention.select import make_backend
from headrace.attention.torch_native import attend_whole

PAGE_SIZE, NUM_PAGES = 16, 24
SHAPE = KvShape(2, 2, 64, torch.float32)
LAYERS = [AttentionLayerSpec(0, 4, 2, 64, 0.125), AttentionLayerSpec(1, 4, 2, 64, 0.1, 20, 5.0)]


class Wrapper:
    """Attention over the planned pages, one sequence at a time, by the reference."""

    plans = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str, use_tensor_cores: bool = False) -> None:
        assert kv_layout == "NHD"
        assert workspace.dtype == torch.uint8

    def set(self, row_starts, page_starts, pages, last_page_lengths, sizes, options) -> None:
        Wrapper.plans += 1
        for tensor in (row_starts, page_starts, pages, last_page_lengths):
            assert tensor.dtype == torch.int32
        num_q_heads, num_kv_heads, head_dim, page_size = sizes
        assert (options["q_data_type"], options["kv_data_type"]) == (torch.float32, torch.float32)
        self.layer = AttentionLayerSpec(
            0,
            num_q_heads,
            num_kv_heads,
            head_dim,
            options["sm_scale"],
            options["window_left"] + 1,
            options["logits_soft_cap"],
        )
        self.rows = []
        for row, last in enumerate(last_page_lengths.tolist()):
            assert 1 <= last <= page_size
            mine = pages[page_starts[row] : page_starts[row + 1]]
            slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()
            length = len(slots) - page_size + last
            self.rows.append((int(row_starts[row]), int(row_starts[row + 1]), slots[:length]))

    def run(self, q: torch.Tensor, paged_kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        k, v = (x.flatten(0, 1) for x in paged_kv)
        out = [
            attend_whole(q[begin:end], k, v, slots, len(slots) - (end - begin), self.layer)
            for begin, end, slots in self.rows
        ]
        return torch.cat(out)


class Decode(Wrapper):
    def plan(self, indptr, indices, last_page_len, *sizes, **options) -> None:
        self.set(torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len, sizes, options)


class Prefill(Wrapper):
    def plan(self, qo_indptr, indptr, indices, last_page_len, *sizes, causal, **options) -> None:
        assert causal
        self.set(qo_indptr, indptr, indices, last_page_len, sizes, options)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("flashinfer")
    fake.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    fake.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(Wrapper, "plans", 0)


def rows_of(steps: list[tuple[int, int]], slots: list[torch.Tensor], *, paged: bool) -> StepRows:
    """steps: (start, count) by sequence."""
    ends = [start + count for start, count in steps]
    table = torch.stack([row[: max(ends)] for row in slots])
    pages = None
    if paged:
        pages, table = (table[:, ::PAGE_SIZE] // PAGE_SIZE).contiguous(), torch.empty(0, 0, dtype=torch.int32)
    counts = [count for _, count in steps]
    return StepRows(
        starts=[start for start, _ in steps],
        counts=counts,
        positions=torch.cat([torch.arange(start, start + count) for start, count in steps]).int(),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        row_starts=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        out_slots=torch.cat([row[a:b] for row, (a, _), b in zip(slots, steps, ends, strict=True)]),
        slots=table,
        pages=pages,
    )


@pytest.mark.parametrize("paged", [False, True])
def test_it_gives_what_the_reference_gives(library: None, paged: bool):
    order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    slots = [
        (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten().to(torch.int32) for pages in order.chunk(3)
    ]
    backends = [make_backend(name) for name in ("flashinfer", "torch_native")]
    for backend in backends:
        backend.make_kv_pool(SHAPE, NUM_PAGES * PAGE_SIZE, PAGE_SIZE, torch.device("cpu"))
    torch.manual_seed(0)

    for steps in ([(0, 16), (0, 33), (0, 1)], [(16, 1), (33, 1), (1, 1)], [(17, 9), (34, 1), (2, 40)]):
        for backend in backends:
            backend.prepare(rows_of(steps, slots, paged=paged and backend.name == "flashinfer"))
        for layer in (*LAYERS, LAYERS[0]):
            num_tokens = sum(count for _, count in steps)
            q, k, v = (torch.randn(num_tokens, heads, 64) for heads in (4, 2, 2))
            got, want = (backend.forward(q, k, v, layer) for backend in backends)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)

    # Two kinds of layer in each of three steps; the third layer is of the first one's kind.
    assert Wrapper.plans == 6
