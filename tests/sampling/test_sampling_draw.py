"""top-k, top-p, min-p and the draw, against a float64 reference that sorts everything."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling.draw import Filters, draw_row, draw_rows, largest
from headrace.sampling.random import uniform

FILTERS = [
    Filters(1.0),
    Filters(0.6, top_k=20, top_p=0.95),
    Filters(1.3, top_k=7),
    Filters(1.0, top_p=0.5),
    Filters(0.8, top_p=0.95),
    Filters(1.0, top_p=0.999),
    Filters(1.0, min_p=0.1),
    Filters(2.0, top_p=0.9, min_p=0.02),
    Filters(1.0, top_k=300, top_p=0.7, min_p=0.01),
    Filters(1.0, top_k=1),
    Filters(1.0, top_p=1e-9),
    Filters(1e-6),
    Filters(1e300),
]


def reference_probabilities(logits: np.ndarray, f: Filters) -> np.ndarray:
    """float64[V]: the distribution after temperature, top-k, top-p, min-p, by definition."""
    scaled = (logits.astype(np.float64) - logits.max()) / f.temperature
    p = np.exp(scaled) / np.exp(scaled).sum()
    order = np.lexsort((np.arange(len(p)), -logits))
    kept = order[: f.top_k or len(p)]
    p_k = p[kept] / p[kept].sum()
    kept = kept[np.concatenate(([0.0], np.cumsum(p_k)[:-1])) < f.top_p]
    kept = kept[p[kept] >= f.min_p * p.max()]
    result = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


def reference_draw(probabilities: np.ndarray, u: float) -> tuple[int, float]:
    """The id, and how close u is to the edge of that id's interval."""
    ends = np.cumsum(probabilities)
    return int(np.searchsorted(ends, u * ends[-1], side="right")), float(np.abs(ends - u).min())


def random_logits(seed: int, size: int = 5003, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


@pytest.mark.parametrize("f", FILTERS, ids=str)
def test_the_token_is_the_one_of_the_reference(f):
    compared = 0
    for seed in range(40):
        logits = random_logits(seed)
        u = float(uniform([seed], [3])[0])
        want, margin = reference_draw(reference_probabilities(logits, f), u)
        got = draw_row(logits, float(logits.max()), f, u)
        if margin > 1e-6:  # nearer to an edge, float32 exponentials may decide otherwise than float64 ones
            assert got == want
            compared += 1
    assert compared >= 30


def test_rows_together_on_any_device_give_the_tokens_of_rows_alone():
    logits = np.stack([random_logits(seed) for seed in range(len(FILTERS))])
    u = uniform(range(len(FILTERS)), [1] * len(FILTERS))
    table = torch.from_numpy(logits)
    together = draw_rows(table, table.amax(dim=1), FILTERS, u)
    alone = [draw_row(row, float(row.max()), f, float(x)) for row, f, x in zip(logits, FILTERS, u, strict=True)]
    assert together.tolist() == alone


@pytest.mark.gpu
def test_a_gpu_gives_the_tokens_of_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    table = torch.from_numpy(np.stack([random_logits(seed) for seed in range(len(FILTERS))]))
    u = uniform(range(len(FILTERS)), [1] * len(FILTERS))
    on_gpu = draw_rows(table.cuda(), table.cuda().amax(dim=1), FILTERS, u).cpu()
    on_cpu = draw_rows(table, table.amax(dim=1), FILTERS, u)
    assert on_gpu.tolist() == on_cpu.tolist()


@pytest.mark.parametrize("f", [f for f in FILTERS if 0.5 < f.temperature < 3.0 and f.top_k != 1], ids=str)
def test_frequencies_match_the_distribution(f):
    logits = random_logits(11, size=600)
    row, peak = logits, float(logits.max())
    num_draws = 4000
    counts = np.zeros(600)
    for u in uniform([2026] * num_draws, range(num_draws)):
        counts[draw_row(row, peak, f, float(u))] += 1
    p = reference_probabilities(logits, f)
    assert counts[p == 0].sum() == 0
    # Pearson's test; ids that expect fewer than 5 draws share one bin. 5 standard deviations: never by chance with these seeds.
    common = p * num_draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * num_draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    degrees = max(len(expected) - 1, 1)
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 0.5, 0.5000001, 3.0]), min_size=1, max_size=300),
    st.integers(1, 300),
)
def test_largest_is_the_head_of_the_full_order(values, k):
    row = np.array(values, dtype=np.float32)
    k = min(k, len(row))
    want = [i for i in np.lexsort((np.arange(len(row)), -row)) if row[i] > -np.inf][:k]
    assert largest(row, k).tolist() == want


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([-np.inf, -40.0, -1.0, 0.0, 0.01, 1.0, 1.0, 5.0]), min_size=2, max_size=700),
    st.sampled_from(FILTERS),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_ties_and_masks_never_give_a_token_that_is_filtered_out(values, f, u):
    row = np.array([*values, 0.0], dtype=np.float32)
    got = draw_row(row, float(row.max()), f, u)
    together = draw_rows(torch.from_numpy(row)[None], torch.tensor([row.max()]), [f], np.array([u]))
    assert 0 <= got < len(row)
    assert together.item() == got
    # The edge of top-p may fall either way by rounding when predecessors weigh exactly top_p: allow one more token there.
    looser = Filters(f.temperature, f.top_k, min(1.0, f.top_p * (1 + 1e-6)), f.min_p * (1 - 1e-6))
    assert reference_probabilities(row, looser)[got] > 0


def test_equal_logits_keep_the_lower_ids():
    row = np.zeros(1000, dtype=np.float32)
    drawn = {draw_row(row, 0.0, Filters(1.0, top_k=3), u) for u in np.linspace(0, 0.9999, 100)}
    assert drawn == {0, 1, 2}
    drawn = {draw_row(row, 0.0, Filters(1.0, top_p=0.0035), u) for u in np.linspace(0, 0.9999, 100)}
    assert drawn == {0, 1, 2, 3}
