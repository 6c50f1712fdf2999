"""Pages of a server with other ranks or another page size: after the way here they are what this server would have written itself."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

from headrace.attention.base import AttentionLayerSpec, KvShape, StepRows
from headrace.attention.select import make_backend
from headrace.disaggregation import wire
from headrace.disaggregation.sink import Incoming, Layout, converted
from headrace.execution.page_transfer import PoolPages
from headrace.kernels import cpu as native_cpu

LAYERS, HEADS, HEAD_DIM, TOKENS = 3, 4, 16, 100
WHOLE = [(0, LAYERS, 0, HEADS)]
SPLITS = {
    "one": WHOLE,
    "two": [(0, LAYERS, 0, 2), (0, LAYERS, 2, 4)],
    "uneven": [(0, LAYERS, 0, 2), (0, LAYERS, 2, 3), (0, LAYERS, 3, 4)],
    "a head twice": [(0, LAYERS, 0, 2), (0, LAYERS, 2, 4), (0, LAYERS, 2, 4)],
    "stages of two": [(0, 2, 0, 2), (0, 2, 2, 4), (2, 3, 0, 2), (2, 3, 2, 4)],
}


def pages_of(backend: str, dtype: torch.dtype, page: int, parts: list[tuple[int, int, int, int]]) -> memoryview:
    """What the backend of each rank writes of the same keys and values, joined as `LeaderPages` does."""
    source = torch.Generator().manual_seed(1)
    kv = torch.randn(LAYERS, 2, TOKENS, HEADS, HEAD_DIM, generator=source)
    count = -(-TOKENS // page)
    slots = torch.arange(TOKENS, dtype=torch.int32)
    ends = torch.tensor([0, TOKENS], dtype=torch.int32)
    rows = StepRows([0], [TOKENS], slots, ends[1:], ends, slots, slots.view(1, -1))
    found = []
    for first, end, head, last in parts:
        attention = make_backend(backend)
        pool = attention.make_kv_pool(
            KvShape(end - first, last - head, HEAD_DIM, dtype), count * page, page, torch.device("cpu")
        )
        attention.prepare(rows)
        for layer in range(first, end):
            k, v = (one[:, head:last].contiguous() for one in kv[layer])
            attention.forward(k, k, v, AttentionLayerSpec(layer - first, last - head, last - head, HEAD_DIM, 1.0))
        found.append(np.frombuffer(PoolPages(pool, list, dict).read(range(count)), np.uint8).reshape(count, -1))
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
    num_theirs, num_ours = -(-TOKENS // theirs), -(-TOKENS // ours)
    layouts = Layout(theirs, 1, tuple(parts)), Layout(ours, 1, tuple(WHOLE))
    one = Incoming("", 0, 1, "", b"", num_known=num_known, pages=list(range(num_known, num_ours)), num_tokens=TOKENS)
    size, got = len(sent) // num_theirs, b""
    for first in range(num_known * ours // theirs, num_theirs, at_once):
        count = min(at_once, num_theirs - first)
        data = sent[first * size : (first + count) * size]
        full, given = converted(one, wire.Pages(1, first, count), data, *layouts)
        assert len(given) == full * (len(want) // num_ours)
        one.num_arrived += full
        got += given
    assert one.num_arrived == len(one.pages)
    assert got == want[num_known * len(want) // num_ours :]


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
    ],
)
def test_what_may_differ(decode: dict[str, str], words: str):
    assert wire.difference(facts(), decode) == words


def test_pages_of_a_layout_that_is_not_known_are_not_converted():
    assert wire.difference(facts(unit="0"), facts(unit="0", page="64")) == "page: 16 computes the prompt, 64 goes on"
    assert "ranks: " in wire.difference(facts(unit="0"), facts(SPLITS["two"], unit="0"))
