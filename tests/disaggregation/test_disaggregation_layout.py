"""Pages of a server with other ranks or another page size: after the way here they are what this server would have written itself."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

from headrace.attention.base import AttentionLayerSpec, KvPool, KvShape, StepRows
from headrace.attention.select import make_backend
from headrace.disaggregation import wire
from headrace.disaggregation.sink import Incoming, Layout, converted
from headrace.execution.page_transfer import PoolPages
from headrace.execution.released import DraftMemory
from headrace.kernels import cpu as native_cpu

LAYERS, HEADS, HEAD_DIM, TOKENS = 3, 4, 16, 100
DRAFT = KvShape(2, 3, 32, torch.float32)
WHOLE = [(0, LAYERS, 0, HEADS)]
SPLITS = {
    "one": WHOLE,
    "two": [(0, LAYERS, 0, 2), (0, LAYERS, 2, 4)],
    "uneven": [(0, LAYERS, 0, 2), (0, LAYERS, 2, 3), (0, LAYERS, 3, 4)],
    "a head twice": [(0, LAYERS, 0, 2), (0, LAYERS, 2, 4), (0, LAYERS, 2, 4)],
    "stages of two": [(0, 2, 0, 2), (0, 2, 2, 4), (2, 3, 0, 2), (2, 3, 2, 4)],
}


def pages_of(
    backend: str, dtype: torch.dtype, page: int, parts: list[tuple[int, int, int, int]], draft: bool | None = None
) -> memoryview:
    """What the backend of each rank writes of the same keys and values, joined as `LeaderPages` does. draft: whether a draft model has written, too;
    None = there is none."""
    source = torch.Generator().manual_seed(1)
    kv = torch.randn(LAYERS, 2, TOKENS, HEADS, HEAD_DIM, generator=source)
    count = -(-TOKENS // page)
    slots = torch.arange(TOKENS, dtype=torch.int32)
    ends = torch.tensor([0, TOKENS], dtype=torch.int32)
    rows = StepRows([0], [TOKENS], slots, ends[1:], ends, slots, slots.view(1, -1))

    def written(shape: KvShape, layers: torch.Tensor) -> KvPool:
        attention = make_backend(backend)
        pool = attention.make_kv_pool(shape, count * page, page, torch.device("cpu"))
        attention.prepare(rows)
        for layer, (k, v) in enumerate(layers):
            spec = AttentionLayerSpec(layer, shape.num_kv_heads, shape.num_kv_heads, shape.head_dim, 1.0)
            attention.forward(k, k, v, spec)
        return pool

    own = torch.randn(DRAFT.num_layers, 2, TOKENS, DRAFT.num_kv_heads, DRAFT.head_dim, generator=source)
    memory = None
    if draft is not None:
        memory = DraftMemory([], make_backend(backend), written(DRAFT, own if draft else own[:0]), bool)
    found = []
    for first, end, head, last in parts:
        shape = KvShape(end - first, last - head, HEAD_DIM, dtype)
        pages = PoolPages(written(shape, kv[first:end, :, :, head:last].contiguous()), list, dict, draft=memory)
        found.append(np.frombuffer(pages.read(range(count)), np.uint8).reshape(count, -1))
    return np.concatenate(found, axis=1).reshape(-1).data


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *itertools.product(["cpu"], ["float32", "bfloat16", "int16", "int8"]),
        *itertools.product(["torch_native"], ["float32", "bfloat16", "int8"]),
    ],
)
@pytest.mark.parametrize("split", [name for name in SPLITS if name != "one"])
def test_pages_of_other_ranks_are_those_of_one(backend: str, dtype: str, split: str):
    if backend == "cpu" and native_cpu.why_not():
        pytest.skip("native kernels")
    kind, parts = getattr(torch, dtype), SPLITS[split]
    unit, count = (16 if backend == "cpu" else 1), -(-TOKENS // 16)
    whole, several = pages_of(backend, kind, 16, WHOLE), pages_of(backend, kind, 16, parts)
    theirs, ours = Layout(16, unit, tuple(parts)), Layout(16, unit, tuple(WHOLE))
    assert ours.pages(theirs.rows(several, count)) == whole
    assert theirs.pages(ours.rows(whole, count)) == several
    assert whole != several


@pytest.mark.parametrize(("theirs", "ours"), [(16, 64), (64, 16), (1, 16), (16, 1), (16, 16), (12, 32)])
@pytest.mark.parametrize("num_known", [0, 1])
@pytest.mark.parametrize("at_once", [1, 3])
def test_pages_of_another_size_are_those_of_ours(theirs: int, ours: int, num_known: int, at_once: int):
    """However many come at a time, and whatever is in the cache already."""
    parts = SPLITS["two"]
    sent = pages_of("torch_native", torch.int8, theirs, parts)
    want = pages_of("torch_native", torch.int8, ours, WHOLE)
    layouts = Layout(theirs, 1, tuple(parts)), Layout(ours, 1, tuple(WHOLE))
    assert arrived(sent, *layouts, num_known, at_once) == want[num_known * len(want) // -(-TOKENS // ours) :]


def arrived(sent: memoryview, theirs: Layout, ours: Layout, num_known: int = 0, at_once: int = 3) -> bytes:
    """What the pages behind the first ones have in the end."""
    num_theirs, num_ours = -(-TOKENS // theirs.page), -(-TOKENS // ours.page)
    one = Incoming("", 0, 1, "", b"", num_known=num_known, pages=list(range(num_known, num_ours)), num_tokens=TOKENS)
    size, got = len(sent) // num_theirs, b""
    for first in range(num_known * ours.page // theirs.page, num_theirs, at_once):
        count = min(at_once, num_theirs - first)
        data = sent[first * size : (first + count) * size]
        full, given = converted(one, wire.Pages(1, first, count), data, theirs, ours)
        one.num_arrived += full
        got += given
    assert one.num_arrived == len(one.pages)
    return got


@pytest.mark.parametrize(
    ("backend", "page", "other"), [("torch_native", 16, 64), ("torch_native", 1, 16), ("cpu", 16, 16)]
)
def test_kv_of_a_draft_model_is_that_of_ours_or_zeros(backend: str, page: int, other: int):
    """Of the same draft model it is laid out anew; of another one, or where there is none, nothing is known."""
    if backend == "cpu" and native_cpu.why_not():
        pytest.skip("native kernels")

    def pages(size: int, draft: bool | None) -> memoryview:
        return pages_of(backend, torch.int8, size, WHOLE, draft)

    def layout(size: int, draft: str) -> Layout:
        about = {"draft": draft, "draft_page": json.dumps([DRAFT.num_layers, draft_bytes * size])} if draft else {}
        return Layout.of(
            {"page": str(size), "unit": "16" if backend == "cpu" else "1", "ranks": json.dumps(WHOLE)} | about
        )

    draft_bytes = DRAFT.num_layers * 2 * DRAFT.num_kv_heads * DRAFT.head_dim * 4  # of a token
    both, blank, without = ([pages(size, draft) for size in (page, other)] for draft in (True, False, None))
    assert len({*map(bytes, (both[1], blank[1], without[1]))}) == 3
    for there, here, want in (
        ("a", "a", both),
        ("a", "b", blank),
        ("a", "", without),
        ("", "", without),
        ("", "a", blank),
    ):
        sent = both[0] if there else without[0]
        assert arrived(sent, layout(page, there), layout(other, here)) == want[1], (there, here)


def facts(parts: Any = WHOLE, **others: str) -> dict[str, str]:
    given = {"page": "16", "unit": "1", "kv": "int8", "weights": "w", "checkpoint": "c", "ranks": json.dumps(parts)}
    return given | others


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (facts(checkpoint="other"), ""),
        (facts(page="64"), ""),
        (facts(SPLITS["two"], weights="other", page="64"), ""),
        (facts(weights="other"), "weights: w computes the prompt, other goes on"),
        (facts(page="64", weights="other"), "weights: w computes the prompt, other goes on"),
        (facts(SPLITS["two"], weights="other", checkpoint="d"), "checkpoint: c computes the prompt, d goes on"),
        (facts(kv="int16", page="64"), "kv: int8 computes the prompt, int16 goes on"),
        (facts(unit="16", page="64"), "unit: 1 computes the prompt, 16 goes on"),
        (facts(draft="d", draft_page="[1, 64]"), ""),
    ],
)
def test_what_may_differ(decode: dict[str, str], words: str):
    assert wire.difference(facts(), decode) == words


def test_pages_of_a_layout_that_is_not_known_are_not_converted():
    assert wire.difference(facts(unit="0"), facts(unit="0", page="64")) == "page: 16 computes the prompt, 64 goes on"
    assert "ranks: " in wire.difference(facts(unit="0"), facts(SPLITS["two"], unit="0"))


@pytest.mark.parametrize("head_dim", [16, 17])  # with 17, a layer of a page does not end with a line of 64 bytes
def test_pages_for_another_process_are_the_same_and_have_their_sums(head_dim: int) -> None:
    count = 39  # so that something is left after whole blocks of 4,096 bytes
    size = count * 16, 3, head_dim
    pool = KvPool([torch.randn(size).bfloat16()], [torch.randn(size).bfloat16()], count * 16, 16)
    pages, order = PoolPages(pool, list, dict), torch.randperm(count).tolist()
    into = memoryview(bytearray(count * pages.page_bytes))

    sums = pages.read_into(order, into)

    assert into == pages.read(order)
    assert wire.checksum(into, sums) == wire.checksum(into)
