"""Typical-p against its definition in float64, and that it neither knows the batch nor leaves a row empty."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import kernels
from headrace.sampling.draw import DrawTable, TokenMasks, typical_logits, typical_rows
from headrace.sampling.params import ResolvedSamplingParams


def kept(logits: np.ndarray, typical_p: float, top_k: int = 0) -> set[int]:
    """The ids of a row that are kept."""
    row = torch.from_numpy(logits.astype(np.float32))[None]
    asked = torch.tensor([top_k]), torch.tensor([typical_p], dtype=torch.float64)
    found = typical_logits(row, *asked)
    assert torch.equal(found, typical_rows(row, *asked)), "a GPU and a CPU keep the same tokens"
    assert torch.equal(found[found > -torch.inf], row[found > -torch.inf])
    return set(torch.nonzero(found[0] > -torch.inf)[:, 0].tolist())


def reference(logits: np.ndarray, typical_p: float, top_k: int = 0) -> tuple[set[int], float]:
    """The same by the definition, and how close the last token was to being left out or followed by another."""
    order = np.lexsort((np.arange(len(logits)), -logits))[: top_k or len(logits)]
    x = logits[order].astype(np.float64)
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
    by_distance = np.argsort(np.abs(-np.log(p) - entropy), kind="stable")
    before = np.cumsum(p[by_distance]) - p[by_distance]
    return set(order[by_distance[before < typical_p]].tolist()), float(np.abs(before[1:] - typical_p).min())


@pytest.mark.parametrize("top_k", [0, 40, 5000])
@pytest.mark.parametrize("typical_p", [0.05, 0.2, 0.5, 0.9, 0.99])
def test_what_is_kept_is_what_the_definition_keeps(typical_p: float, top_k: int):
    compared = 0
    for seed in range(12):
        logits = (np.random.default_rng(seed).standard_normal(3001) * (1 + seed % 4)).astype(np.float32)
        want, margin = reference(logits, typical_p, top_k)
        if margin > 1e-6:
            assert kept(logits, typical_p, top_k) == want
            compared += 1
    assert compared >= 8


def test_the_most_likely_token_may_be_left_out():
    """One token has 0.4 of the mass, and 64 share the rest: those are nearer to the entropy."""
    logits = np.full(65, np.log(0.6 / 64), dtype=np.float32)
    logits[7] = np.log(0.4)
    assert 7 not in kept(logits, 0.3)
    assert 7 in kept(logits, 0.7)


@pytest.mark.parametrize("typical_p", [1e-12, 0.5, 1.0])
def test_a_row_is_never_left_empty(typical_p: float):
    for logits in ([0.0], [5.0, -100.0], [1.0, 1.0, 1.0], [-np.inf, 2.0, -np.inf], [1e30, 0.0, -1e30]):
        assert kept(np.array(logits), typical_p)


def test_equal_tokens_are_kept_from_the_lowest_id():
    assert kept(np.zeros(1000), 0.0035) == {0, 1, 2, 3}
    assert kept(np.zeros(1000), 0.5, top_k=10) == {0, 1, 2, 3, 4}


def test_rows_that_cannot_be_sampled_stay_as_they_are():
    rows = torch.tensor([[torch.nan, 1.0], [-torch.inf, -torch.inf], [torch.inf, 0.0]])
    found = typical_logits(rows, torch.zeros(3, dtype=torch.int64), torch.full((3,), 0.5, dtype=torch.float64))
    for one in (
        found,
        typical_rows(rows, torch.zeros(3, dtype=torch.int64), torch.full((3,), 0.5, dtype=torch.float64)),
    ):
        assert torch.equal(one.nan_to_num(7.0), rows.nan_to_num(7.0))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([-np.inf, -40.0, -20.0, -1.0, 0.0, 0.01, 1.0, 1.0, 5.0]), min_size=1, max_size=300),
    st.sampled_from([0, 1, 2, 7, 100]),
    st.floats(1e-9, 1.0),
)
def test_ties_do_not_matter(values: list[float], top_k: int, typical_p: float):
    """`kept` compares two ways to find them: with a stable sort, and by looking at the edge."""
    assert 0 < len(kept(np.array([*values, 0.0]), typical_p, top_k)) <= (top_k or len(values) + 1)


def drawn(table: DrawTable, logits: torch.Tensor, seqs: list[int], masks: TokenMasks | None = None) -> list[int]:
    return table.draw(logits, seqs, [3] * len(seqs), range(len(seqs)), masks).tolist()


def filled_table(filters: list[dict[str, float]]) -> DrawTable:
    table = DrawTable(len(filters))
    for seq, one in enumerate(filters):
        table.set(seq, ResolvedSamplingParams(max_new_tokens=1, seed=seq, **one))
    return table


def test_a_row_has_the_same_token_alone_in_any_batch_and_in_torch():
    filters = [{"typical_p": p, "top_k": k} for p in (0.2, 0.7, 1.0) for k in (0, 9)] * 3
    logits = torch.from_numpy((np.random.default_rng(3).standard_normal((len(filters), 5003)) * 3).astype(np.float32))
    before, table, seqs = logits.clone(), filled_table(filters), list(range(len(filters)))
    together = drawn(table, logits, seqs)
    assert torch.equal(logits, before)
    assert [drawn(table, logits[seq : seq + 1], [seq])[0] for seq in seqs] == together
    assert drawn(table, logits.flip(0), seqs[::-1])[::-1] == together
    with kernels.prefer("torch"):
        assert drawn(table, logits, seqs) == together
    for seq, token in enumerate(together):
        one = filters[seq]
        assert token in reference(logits[seq].numpy(), min(one["typical_p"] + 1e-6, 1.0), one["top_k"])[0]


def test_what_a_mask_forbids_is_not_looked_at():
    """The typical tokens are those of the allowed ones, so some is always left."""
    filters = [{"typical_p": 0.2}] * 4
    logits = torch.from_numpy((np.random.default_rng(5).standard_normal((4, 64)) * 3).astype(np.float32))
    words = np.array([[1 << 3 | 1 << 9, 0], [0, 1 << 2]], dtype=np.int32)
    masks = TokenMasks(words, np.array([0, 1, -1, 0], dtype=np.int64))
    tokens = drawn(filled_table(filters), logits, [0, 1, 2, 3], masks)
    assert {tokens[0], tokens[3]} <= {3, 9}
    assert tokens[1] == 34
    assert tokens[2] in reference(logits[2].numpy(), 0.2)[0]


def test_the_temperature_comes_after():
    """However hot or cold, the same tokens are drawn from, as llama.cpp has it; greedy rows take the most likely token of all."""
    logits = np.full((1, 65), np.log(0.6 / 64), dtype=np.float32)
    logits[0, 7] = np.log(0.4)
    for temperature in (0.1, 1.0, 10.0):
        table = filled_table([{"temperature": temperature, "typical_p": 0.3}])
        assert drawn(table, torch.from_numpy(logits), [0]) != [7]
    table = filled_table([{"temperature": 0.0}])
    assert drawn(table, torch.from_numpy(logits), [0]) == [7]


@pytest.mark.gpu
def test_a_gpu_keeps_the_tokens_of_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    filters = [{"typical_p": p, "top_k": k} for p in (0.2, 0.7, 1.0) for k in (0, 9)]
    logits = torch.from_numpy((np.random.default_rng(3).standard_normal((6, 5003)) * 3).astype(np.float32))
    words = np.random.default_rng(4).integers(-(2**31), 2**31, (2, 157), dtype=np.int32)
    for masks in (None, TokenMasks(words, np.array([0, 1, -1, 0, 1, -1], dtype=np.int64))):
        want = drawn(filled_table(filters), logits, [0, 1, 2, 3, 4, 5], masks)
        assert drawn(filled_table(filters), logits.cuda(), [0, 1, 2, 3, 4, 5], masks) == want
